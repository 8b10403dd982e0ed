"""Write the model card of an artifact, and figures into a card.

The card takes over licence, languages, task and text of the source's card.  Text of a checkpoint
stands in code spans, where markdown and HTML mean nothing.  The card is not in the artifact's
digest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp4convert.checkpoint.dialects.forms import granularity_word
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.engines.files import Engine
from fp4convert.engines.verdicts import Verdict, find_traps, judge_all, trap_text
from fp4convert.errors import OutputError, shell_line
from fp4convert.execution.settings import Result
from fp4convert.numerics.formats import format_named
from fp4convert.planning.engine_facts import load_code, plan_contents
from fp4convert.planning.plan import Plan
from fp4convert.report.text import adapter_text, evaluation_rows, fake_quantized_text, spell
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.disk import write_errors_at
from fp4convert.storage.source import Source
from fp4convert.version import __version__

# Words of the source's front matter.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
WORD_LIMIT = 300  # characters of such a word
CARD_LIMIT = 1 << 20  # bytes of the source's card
KEPT_LINES = 40
# Options that may name files of this machine: their names alone are told.
PATHS = ("calibration", "global_scale", "input_scale", "lora", "recipe")
ANY_CARD = Paper("--card", "README.md", "")
# Between them is what `evaluate --card` writes.
EVALUATION, EVALUATION_END = (
    "<!-- made: fp4convert evaluate -->",
    "<!-- end: fp4convert evaluate -->",
)
_EVALUATED = re.compile(f"{EVALUATION}((?!{EVALUATION}).)*?{EVALUATION_END}", re.DOTALL)
_PLAIN = re.compile(r"(?!.*www)[A-Za-z0-9 ,.:'()+-]*")


class CardRequest(NamedTuple):
    """The contents of a card beside the plan.

    repo       repository of the artifact
    options    of the command that makes the artifact again, with their values; None for an option
               that was not given
    errors     rows of a table, the headings first; None without measured errors
    evaluated  the section of an earlier card, from evaluation_in
    """

    repo: str
    options: Mapping[str, object]
    errors: Sequence[Sequence[object]] | None = None
    evaluated: str = ""


def make_card(plan: Plan, result: Result, source: Source, request: CardRequest) -> str:
    """Return the text of README.md."""
    known, body = _read_own_card(source)
    checkpoint = source.checkpoint
    at = f" at commit {code(checkpoint.revision)}" if checkpoint.revision else ""
    made = f"{len(plan.quantized)} linear layers in {plan.target.format.upper()}"
    parts = [
        f"# {code(request.repo.rpartition('/')[2])}",
        f"{code(checkpoint.repo or source.name)}{at}, {made}, made by fp4convert {__version__}.",
        _table(list(_facts(plan, result))),
        "## How it was made",
        _fence("sh", _command(source, request.options)),
        *_loading(plan, source, request.repo),
        *([] if request.errors is None else ["## Errors", _table(request.errors)]),
        *([request.evaluated] if request.evaluated not in body else []),
        "## What is not quantized",
        "\n".join(_kept_lines(plan)),
        *(["## The model card of the source", body] if body else []),
    ]
    return f"---\n{_front_matter(plan, source, known)}\n---\n\n" + "\n\n".join(parts) + "\n"


def add_evaluation(path: Path, evaluated: dict[str, Any], source: Source, adapter: str = "") -> str:
    """Write the figures of `evaluate` into a card.

    An earlier section of figures is replaced, everything else stays; a missing card is made.
    evaluated  the document of `evaluate --json`
    adapter    name of the adapter that was merged into the source; empty without one
    Returns    a line for a person
    Raises     OutputError if it cannot be written
    """
    checkpoint = source.checkpoint
    at = f" at commit {code(checkpoint.revision)}" if checkpoint.revision else ""
    of = f"Beside {code(checkpoint.repo or source.name)}{at}"
    of += f" with the adapter {code(adapter)} merged" if adapter else ""
    of += ", by `fp4convert evaluate`"
    # All of these words are ours.
    rows = "\n".join(f"| {name} | {words} |" for name, words in evaluation_rows(evaluated).items())
    parts = [EVALUATION, "## Predictions", f"{of} {__version__}.", f"| | |\n|---|---|\n{rows}"]
    if layers := evaluated["by_layer"]:
        named = [(row["layer"], row["alone"], row["cumulated"]) for row in layers]
        parts += [
            "Mean KL divergence by layer, in nats:",
            _table([("layer", "alone", "cumulated"), *named]),
        ]
    section = "\n\n".join([*parts, EVALUATION_END])

    text = _read_card(path)
    if _EVALUATED.search(text):
        text = _EVALUATED.sub(lambda _: section, text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}\n".lstrip("\n")
    write_paper(path, text, ANY_CARD)
    return f"card: {path}"


def evaluation_in(path: Path) -> str:
    """Return the section of `evaluate` in a card; "" without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        text = stream.read(CARD_LIMIT).decode("utf-8", "replace")
    return found[0] if (found := _EVALUATED.search(text)) else ""


def check_card(path: Path) -> None:
    """Raise OutputError if no card can be written or added to."""
    check_place(path, ANY_CARD)
    _read_card(path)


def _read_card(path: Path) -> str:
    """Return the text of a card; "" without a card.

    Raises  OutputError for a file that is no text, or longer than any card
    """
    if not path.exists():
        return ""
    expected = f"expected a text in UTF-8 of at most {CARD_LIMIT:,} bytes"
    with write_errors_at(path), path.open("rb") as stream:
        data = stream.read(CARD_LIMIT + 1)
    try:
        if len(data) > CARD_LIMIT:
            raise ValueError(f"more than {CARD_LIMIT:,} bytes")
        text = data.decode("utf-8")
        if text.count(EVALUATION) != text.count(EVALUATION_END):
            raise ValueError(f"one of {EVALUATION} and {EVALUATION_END} stands alone")
        return text
    except ValueError as error:
        detail = f"{path} is no model card: {error}; {expected}"
        raise OutputError("cannot-write", detail, "Give another: --card README.md.") from None


def code(text: object) -> str:
    """Write a code span that its text cannot end, in a table too.

    Characters that cannot be printed show as \\xNN.
    """
    shown = "".join(c if c.isprintable() and c != "|" else spell(c) for c in str(text))
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    is_bare = not shown.strip() or shown[0] in "` " or shown[-1] in "` "
    pad = " " if is_bare else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _front_matter(plan: Plan, source: Source, known: Mapping[str, Any]) -> str:
    """Return the YAML between the dashes, spelled by huggingface_hub."""
    from huggingface_hub import ModelCardData

    target, checkpoint = plan.target, source.checkpoint
    ours: dict[str, Any] = {}
    if checkpoint.repo:
        ours |= {"base_model": checkpoint.repo, "base_model_relation": "quantized"}
    loads = {
        each.engine.key for each in judge_all(plan_contents(plan, checkpoint)) if each.may_load
    }
    if "transformers" in loads and checkpoint.config.get("architectures"):
        ours["library_name"] = "transformers"
    elif "mlx" in loads:
        ours["library_name"] = "mlx"
    tags = ["fp4convert", target.format, str(target.dialect)]
    return str(ModelCardData(**known, **ours, tags=tags, ignore_metadata_errors=True).to_yaml())


def _read_own_card(source: Source) -> tuple[dict[str, Any], str]:
    """Read the source's front matter that is taken over, and the text below."""
    if not source.has_file(CARD) or source.file_nbytes(CARD) > CARD_LIMIT:
        return {}, ""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, RepoCard

    with source.open_file(CARD) as stream:
        text = stream.read().decode("utf-8", "replace").removeprefix("\ufeff")
    if (match := REGEX_YAML_BLOCK.search(text)) is None:
        return {}, text.strip()
    try:
        known = dict(vars(RepoCard(match[0]).data))
    except Exception:
        # YAML of strangers fails in many ways, and the parser's errors share no base class.
        known = {}
    carried = {}
    for key in CARRIED:
        value = known.get(key)
        words = value if isinstance(value, list) and value else [value]
        if all(isinstance(w, str) and w.isprintable() and len(w) <= WORD_LIMIT for w in words):
            carried[key] = value
    return carried, text[match.end() :].strip()


def _facts(plan: Plan, result: Result) -> Iterator[tuple[object, ...]]:
    """Yield rows that describe the artifact."""
    target = plan.target
    fmt = format_named(target.format)
    wide = ", a float32 global scale" if fmt.has_global_scale else ""
    form, element = form_of(target), "E4M3" if fmt.is_fp8 else "E2M1"
    granularity = form.granularity or ""
    blocks = f"{fmt.block_size} to a block, {fmt.scale_dtype} block scales"
    if isinstance(granularity, str) and not fmt.block_size:
        blocks = f"a float32 scale to a {granularity}"
    elif not fmt.block_size:
        blocks = f"a float32 scale to a block of {granularity_word(granularity)}"
    yield "", ""
    yield "format", f"{fmt.name}: {element} codes, {blocks}{wide}"
    yield "dialect", target.dialect
    yield "scale rule", target.rule_for(fmt)
    if target.method not in (None, "rtn"):
        yield "method", target.method
    if adapter := plan.adapter:
        named = code(adapter.repo or adapter.name)
        at = f" at commit {code(adapter.revision)}" if adapter.revision else ""
        scale = f", times {adapter.scale:g}" if adapter.scale != 1 else ""
        yield "adapter", f"{named}{at}{scale}, merged before rounding"
        kept = (result.fidelity or {}).get("adapter")
        if isinstance(kept, dict):
            yield "adapter kept", code(adapter_text(kept).removeprefix("adapter kept: "))
    exact = (result.fidelity or {}).get("fake_quantized")
    if isinstance(exact, dict):
        yield "source", code(fake_quantized_text(exact))
    bits = target.activations
    yield "activations", f"{bits} bits{': engines quantize them, too' if bits != 16 else ''}"
    if target.kv_cache:
        scaled = "with a scale for each attention's keys and values"
        yield "cache of keys and values", f"{target.kv_cache.upper()}, {scaled}"
    sizes = (
        f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"
        for nbytes in (result.source_bytes, result.output_bytes)
    )
    yield "size", "{} before, {} after".format(*sizes)
    yield "digest", result.digest


def _command(source: Source, options: Mapping[str, object]) -> str:
    """Return the command that makes the artifact again, for a shell."""
    checkpoint = source.checkpoint
    pinned = {"revision": checkpoint.revision} if checkpoint.repo else {}
    words = ["fp4convert", "quantize", checkpoint.repo or f"./{source.name}"]
    for name, value in {**options, **pinned}.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one in (None, False):
                continue
            words.append(f"--{name.replace('_', '-')}")
            if name in PATHS and isinstance(one, str) and Path(one).exists():
                words.append(f"./{Path(one).name}")
            elif one is not True:
                words.append(str(one))
    return shell_line(*words)


def _fence(language: str, text: str) -> str:
    """Write a block of code that its text cannot end."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _loading(plan: Plan, source: Source, repo: str) -> Iterator[str]:
    """Yield sections on engines that load it, and on engines that fail."""
    config = source.checkpoint.config
    if source.checkpoint.components:
        return  # whose parts are artifacts, each of its own
    contents = plan_contents(plan, source.checkpoint)
    for verdict in judge_all(contents):
        is_model = bool(config.get("architectures")) or not verdict.engine.code
        if verdict.may_load and is_model:
            yield from _with_engine(verdict, plan, config, repo)
    if traps := [trap_text(*trap) for trap in find_traps(contents)]:
        yield "## Known not to load it"
        yield "\n".join(f"- {trap}." for trap in traps)


def _with_engine(
    verdict: Verdict, plan: Plan, config: Mapping[str, Any], repo: str
) -> Iterator[str]:
    """Yield a heading for an engine, its needs, and the line to type."""
    engine = verdict.engine
    yield f"## With {engine.name}"
    versions = f" Versions {code(verdict.versions)}." if verdict.versions else ""
    says = verdict.row.says if verdict.row else verdict.why
    yield f"{verdict.words[0].upper()}{verdict.words[1:]}: it {says}.{versions}"
    if engine.code:
        yield _install(engine, str(plan.target.dialect))
        yield _fence("python", "\n".join(load_code(engine, config, repo)))
    elif "{output}" in engine.serve:
        yield _fence("sh", engine.serving(plan.target.kv_cache).format(output=repo))


def _install(engine: Engine, dialect: str) -> str:
    packages = " ".join(filter(None, (engine.name, engine.packages.get(dialect))))
    return f"`pip install {packages}`"


def _kept_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for every pattern of tensors that are not four-bit.

    Numbers of layers become stars.
    """
    steps = [step for step in plan.steps if step.action in ("copy", "skip")]
    counts = Counter((re.sub(r"\d+", "*", step.refs[0].name), step.reason) for step in steps)
    for (pattern, reason), count in list(counts.items())[:KEPT_LINES]:
        yield f"- {code(pattern)}: {count}, {_cell(reason)}"
    if len(counts) > KEPT_LINES:
        yield f"- {len(counts) - KEPT_LINES} patterns more, {len(steps)} tensors in all"
    if not counts:
        yield "Nothing."


def _table(rows: Sequence[Sequence[object]]) -> str:
    """Write rows as a table of markdown, the first its headings."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(value: object) -> str:
    """Write a number or words; as code if markdown could read them."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else code(text)
