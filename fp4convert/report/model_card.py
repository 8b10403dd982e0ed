"""Write the model card of an artifact.

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

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import granularity_word
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.engines.files import Engine
from fp4convert.engines.rows import Contents
from fp4convert.engines.verdicts import Verdict, find_traps, judge_all, trap_text
from fp4convert.errors import shell_line
from fp4convert.execution.settings import Result
from fp4convert.numerics.formats import format_named
from fp4convert.planning.engine_facts import load_code, plan_contents
from fp4convert.planning.plan import Plan
from fp4convert.report.text import (
    adapter_text,
    artifact_rows,
    fake_quantized_text,
    spell,
)
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.source import Source
from fp4convert.version import __version__

# Words of the source's front matter.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
WORD_LIMIT = 300  # characters of such a word
CARD_LIMIT = 1 << 20  # bytes of a card
KEPT_LINES = 40
# Options that may name files of this machine: their names alone are told.
PATHS = ("calibration", "global_scale", "input_scale", "lora", "recipe")
_PLAIN = re.compile(r"(?!.*www)[A-Za-z0-9 ,.:'()+-]*")


class Subject(NamedTuple):
    """The artifact of a card, as a plan or its own files describe it.

    origin    repository or name of the source
    revision  commit of a repository; None for a folder
    layers    number of quantized linear layers
    rows      of a table of facts, the headings first
    contents  facts that engine rows ask about; None where its parts are artifacts
    kept      patterns of tensors that are not quantized, with their number and the reason
    """

    origin: str
    revision: str | None
    is_repo: bool
    layers: int
    format: str
    dialect: str
    kv_cache: str | None
    config: Mapping[str, Any]
    rows: Sequence[Sequence[object]]
    contents: Contents | None
    kept: Counter[tuple[str, str]]

    @property
    def place(self) -> str:
        """Return how a command names the source."""
        return self.origin if self.is_repo else f"./{Path(self.origin).name}"


class CardRequest(NamedTuple):
    """The contents of a card beside the artifact.

    repo       repository of the artifact
    options    of the command that makes the artifact again, with their values; None for an option
               that was not given
    errors     rows of a table, the headings first; None without measured errors
    evaluated  the section on predictions, from evaluation_card
    """

    repo: str
    options: Mapping[str, object]
    errors: Sequence[Sequence[object]] | None = None
    evaluated: str = ""


def make_card(subject: Subject, card: Source, request: CardRequest) -> str:
    """Return the text of README.md.

    card  a source with the model card of the original weights, if it has one
    """
    known, body = _read_own_card(card)
    at = f" at commit {code(subject.revision)}" if subject.revision else ""
    made = f"{subject.layers} linear layers in {subject.format.upper()}"
    parts = [
        f"# {code(request.repo.rpartition('/')[2])}",
        f"{code(subject.origin)}{at}, {made}, made by fp4convert {__version__}.",
        table(subject.rows),
        "## How it was made",
        _fence("sh", _command(subject, request.options)),
        "## How to check it",
        _fence("sh", _checks(subject, request.repo)),
        *_loading(subject, request.repo),
        *(["## Errors", table(request.errors)] if request.errors else []),
        *([request.evaluated] if request.evaluated not in body else []),
        "## What is not quantized",
        "\n".join(_kept_lines(subject.kept)),
        *(["## The model card of the source", body] if body else []),
    ]
    return f"---\n{_front_matter(subject, known)}\n---\n\n" + "\n\n".join(parts) + "\n"


def describe_plan(plan: Plan, result: Result, source: Source) -> Subject:
    """Describe the artifact that a plan has made."""
    checkpoint, target = source.checkpoint, plan.target
    steps = [step for step in plan.steps if step.action in ("copy", "skip")]
    return Subject(
        checkpoint.repo or source.name,
        checkpoint.revision,
        bool(checkpoint.repo),
        len(plan.quantized),
        target.format,
        str(target.dialect),
        target.kv_cache,
        checkpoint.config,
        list(_facts(plan, result)),
        None if checkpoint.components else plan_contents(plan, checkpoint),
        Counter((_starred(step.refs[0].name), step.reason) for step in steps),
    )


def describe_artifact(artifact: Artifact, document: dict[str, Any], digest: str) -> Subject:
    """Describe a finished artifact.

    document  of `inspect`
    """
    from fp4convert.quality.engine_check import artifact_contents

    origin = artifact.record.get("source")
    origin = origin if isinstance(origin, dict) else {}
    stored = {ref.name for packed in artifact.packed.values() for ref in packed.refs}
    rows = [("", ""), *artifact_rows(document).items(), ("digest", digest)]
    cache = document.get("kv_cache")
    return Subject(
        str(origin.get("repo") or "SOURCE"),
        origin.get("revision"),
        bool(origin.get("repo")),
        len(artifact.packed),
        str(document["format"]),
        artifact.dialect,
        cache["dtype"] if cache else None,
        artifact.source.checkpoint.config,
        [(word, text if word == "" else code(text)) for word, text in rows],
        artifact_contents(artifact, ()),
        Counter((_starred(name), "as in the source") for name in artifact.tensors.keys() - stored),
    )


def _starred(name: str) -> str:
    """Replace the numbers in a name by stars."""
    return re.sub(r"\d+", "*", name)


def code(text: object) -> str:
    """Write a code span that its text cannot end, in a table too.

    Characters that cannot be printed show as \\xNN.
    """
    shown = "".join(c if c.isprintable() and c != "|" else spell(c) for c in str(text))
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    is_bare = not shown.strip() or shown[0] in "` " or shown[-1] in "` "
    pad = " " if is_bare else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _front_matter(subject: Subject, known: Mapping[str, Any]) -> str:
    """Return the YAML between the dashes, spelled by huggingface_hub."""
    from huggingface_hub import ModelCardData

    ours: dict[str, Any] = {}
    if subject.is_repo:
        ours |= {"base_model": subject.origin, "base_model_relation": "quantized"}
    verdicts = judge_all(subject.contents) if subject.contents else ()
    loads = {each.engine.key for each in verdicts if each.may_load}
    if "transformers" in loads and subject.config.get("architectures"):
        ours["library_name"] = "transformers"
    elif "mlx" in loads:
        ours["library_name"] = "mlx"
    tags = ["fp4convert", subject.format, subject.dialect]
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


def _command(subject: Subject, options: Mapping[str, object]) -> str:
    """Return the command that makes the artifact again, for a shell."""
    pinned = {"revision": subject.revision} if subject.is_repo else {}
    words = ["fp4convert", "quantize", subject.place]
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


def _checks(subject: Subject, repo: str) -> str:
    """Return the commands that check an artifact by its source."""
    lines = [shell_line("fp4convert", "verify", repo, "--source", subject.place)]
    if subject.is_repo:
        lines.append(shell_line("fp4convert", "reproduce", repo))
    return "\n".join(lines)


def _fence(language: str, text: str) -> str:
    """Write a block of code that its text cannot end."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _loading(subject: Subject, repo: str) -> Iterator[str]:
    """Yield sections on engines that load it, and on engines that fail."""
    if subject.contents is None:
        return
    has_class = bool(subject.config.get("architectures"))
    loading = [
        each
        for each in judge_all(subject.contents)
        if each.may_load and (has_class or not each.engine.code)
    ]
    if loading:
        heads = ("engine", "versions", "how that is known")
        yield "## What loads it"
        yield table([heads, *((v.engine.name, v.versions, v.words) for v in loading)])
    for verdict in loading:
        yield from _with_engine(verdict, subject, repo)
    if traps := [trap_text(*trap) for trap in find_traps(subject.contents)]:
        yield "## Known not to load it"
        yield "\n".join(f"- {trap}." for trap in traps)


def _with_engine(verdict: Verdict, subject: Subject, repo: str) -> Iterator[str]:
    """Yield a heading for an engine, its needs, and the line to type."""
    engine = verdict.engine
    yield f"## With {engine.name}"
    yield f"It {verdict.row.says if verdict.row else verdict.why}."
    if engine.code:
        yield _install(engine, subject.dialect)
        yield _fence("python", "\n".join(load_code(engine, subject.config, repo)))
    elif "{output}" in engine.serve:
        yield _fence("sh", engine.serving(subject.kv_cache).format(output=repo))


def _install(engine: Engine, dialect: str) -> str:
    packages = " ".join(filter(None, (engine.name, engine.packages.get(dialect))))
    return f"`pip install {packages}`"


def _kept_lines(kept: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for every pattern of tensors that are not four-bit."""
    for (pattern, reason), count in list(kept.items())[:KEPT_LINES]:
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        yield f"- {code(pattern)}: {tensors}, {_cell(reason)}"
    if len(kept) > KEPT_LINES:
        yield f"- {len(kept) - KEPT_LINES} patterns more, {kept.total()} tensors in all"
    if not kept:
        yield "Nothing."


def table(rows: Sequence[Sequence[object]]) -> str:
    """Write rows as a table of markdown, the first its headings."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(value: object) -> str:
    """Write a number or words; as code if markdown could read them."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else code(text)
