"""Write the model card of a pushed artifact.

Decides what of the source's own card travels: its licence, languages and task, and its text below ours.  Whatever a checkpoint
says stands in code spans, where markdown and HTML mean nothing.  The card is no part of the artifact's digest.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fp4convert.execution.settings import Result
from fp4convert.numerics.formats import format_named
from fp4convert.planning.steps import Plan
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.source import Source

CARRIED = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
)  # of the source's front matter
WORD_LIMIT = 300  # characters of such a word
CARD_LIMIT = 1 << 20  # bytes of the source's card
KEPT_LINES = 40
PATHS = (
    "calibration",
    "input_scale",
    "recipe",
)  # options that may name files of this machine: their names alone are told
CAUSAL = "ForCausalLM"
TRANSFORMERS = {
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "mxfp4"),
    ("quark", "mxfp4"),
}  # the README says why
VLLM = TRANSFORMERS | {("modelopt", "nvfp4")}
MLX = {("mlx", "nvfp4"), ("mlx", "mxfp4")}
_PLAIN = re.compile(r"(?!.*www)[A-Za-z0-9 ,.:'()+-]*")
_EXPERT = re.compile(r"\.experts\.\d")  # transformers ignores global scales there


@dataclass(frozen=True, slots=True)
class CardRequest:
    """What a card is for.

    repo     where it goes
    options  of the command that makes the artifact again: words with their values; one that is None was not given
    errors   rows of a table, the first its headings; None where nothing was measured
    """

    repo: str
    options: Mapping[str, object]
    errors: Sequence[Sequence[object]] | None = None


def make_card(plan: Plan, result: Result, source: Source, request: CardRequest) -> str:
    """The text of README.md."""
    known, body = _own_card(source)
    parts = [
        f"# {code(request.repo.rpartition('/')[2])}",
        _introduction(plan, source),
        _table(_facts(plan, result)),
        "## How it was made",
        _fenced("sh", _command(source, request.options)),
        *_loading(plan, source, request.repo),
        *([] if request.errors is None else ["## Errors", _table(request.errors)]),
        "## What stays as it was",
        "\n".join(_kept(plan)),
        *(["## The model card of the source", body] if body else []),
    ]
    return f"---\n{_front_matter(plan, source, known)}\n---\n\n" + "\n\n".join(parts) + "\n"


def code(text: object) -> str:
    """`text` as a code span that ends where it is meant to, in a table too; what is not printable shows as \\xNN."""
    shown = "".join(c if c.isprintable() and c != "|" else _spelled(c) for c in str(text))
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = (
        " "
        if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) or not shown.strip()
        else ""
    )
    return f"{fence}{pad}{shown}{pad}{fence}"


def _spelled(character: str) -> str:
    number = ord(character)
    return (
        f"\\x{number:02x}"
        if number < 0x100
        else f"\\u{number:04x}"
        if number < 0x10000
        else f"\\U{number:08x}"
    )


def _front_matter(plan: Plan, source: Source, known: Mapping[str, Any]) -> str:
    """The YAML between the dashes, spelled by huggingface_hub."""
    from huggingface_hub import ModelCardData

    target, repo = plan.target, source.checkpoint.repo
    ours: dict[str, Any] = {}
    if repo:
        ours |= {"base_model": repo, "base_model_relation": "quantized"}
    if (target.dialect, target.format) in TRANSFORMERS and source.checkpoint.config.get(
        "architectures"
    ):
        ours["library_name"] = "transformers"
    elif (target.dialect, target.format) in MLX:
        ours["library_name"] = "mlx"
    tags = ["fp4convert", target.format, str(target.dialect)]
    return str(ModelCardData(**known, **ours, tags=tags, ignore_metadata_errors=True).to_yaml())


def _own_card(source: Source) -> tuple[dict[str, Any], str]:
    """What travels of the source's front matter, and the text below it."""
    if not source.has_file(CARD) or source.file_nbytes(CARD) > CARD_LIMIT:
        return {}, ""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, RepoCard

    with source.open_file(CARD) as stream:
        text = stream.read().decode("utf-8", "replace").removeprefix("\ufeff")
    if (match := REGEX_YAML_BLOCK.search(text)) is None:
        return {}, text.strip()
    try:
        known = dict(vars(RepoCard(match[0]).data))
    except (
        Exception
    ):  # YAML of strangers fails in many ways, and the parser's errors share no base class
        known = {}
    return {key: known[key] for key in CARRIED if _is_plain(known.get(key))}, text[
        match.end() :
    ].strip()


def _is_plain(value: object) -> bool:
    """True for a word, or a list of words."""
    words = value if isinstance(value, list) and value else [value]
    return all(
        isinstance(word, str) and word.isprintable() and len(word) <= WORD_LIMIT for word in words
    )


def _introduction(plan: Plan, source: Source) -> str:
    checkpoint = source.checkpoint
    name = code(checkpoint.repo or source.name)
    at = f" at commit {code(checkpoint.revision)}" if checkpoint.revision else ""
    made = f"{len(plan.quantized)} linear layers in {plan.target.format.upper()}"
    return f"{name}{at}, {made}, made by fp4convert {version('fp4convert')}."


def _facts(plan: Plan, result: Result) -> Iterator[tuple[object, ...]]:
    target = plan.target
    fmt = format_named(target.format)
    wide = ", a float32 global scale" if fmt.has_global_scale else ""
    activations = "16 bits" if target.activations == 16 else "4 bits: engines quantize them, too"
    yield "", ""
    yield (
        "format",
        f"{fmt.name}: E2M1 codes, {fmt.block_size} to a block, {fmt.scale_dtype} block scales{wide}",
    )
    yield "dialect", target.dialect
    yield "scale rule", target.rule_for(fmt)
    if target.method not in (None, "rtn"):
        yield "method", target.method
    yield "activations", activations
    if target.kv_cache:
        yield "cache of keys and values", "FP8, with a scale for each attention's keys and values"
    yield "size", f"{_size(result.source_bytes)} before, {_size(result.output_bytes)} after"
    yield "digest", result.digest


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def _command(source: Source, options: Mapping[str, object]) -> str:
    """The command that makes the artifact again, to be pasted into a shell."""
    checkpoint = source.checkpoint
    pinned = {"revision": checkpoint.revision} if checkpoint.repo else {}
    words = ["fp4convert", "quantize", checkpoint.repo or f"./{source.name}"]
    for name, value in {**options, **pinned}.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            word = (
                f"./{Path(one).name}"
                if isinstance(one, str) and name in PATHS and Path(one).exists()
                else one
            )
            words += (
                []
                if one in (None, False)
                else [f"--{name.replace('_', '-')}", *([] if one is True else [str(word)])]
            )
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """A word for a shell, on one line; bash reads $'...' where the word is not printable."""
    if word.isprintable():
        return shlex.quote(word)
    inner = "".join(
        f"\\U{ord(c):08x}" if not c.isprintable() else f"\\{c}" if c in "\\'" else c for c in word
    )
    return f"$'{inner}'"


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _loading(plan: Plan, source: Source, repo: str) -> Iterator[str]:
    """A heading and an example for each engine that is known to load the dialect."""
    kind = (str(plan.target.dialect), plan.target.format)
    architectures = source.checkpoint.config.get("architectures")
    if source.checkpoint.components or "_class_name" in source.checkpoint.config:
        return  # of Diffusers, which loads none of these folders; the README says what it does load
    if kind in TRANSFORMERS and architectures and not _has_wrong_experts(plan):
        of = architectures if isinstance(architectures, list) else []
        model = (
            f"AutoModel{CAUSAL}" if any(str(name).endswith(CAUSAL) for name in of) else "AutoModel"
        )
        lines = f'from transformers import {model}\n\nmodel = {model}.from_pretrained("{repo}", dtype="auto")'
        package = "compressed-tensors" if kind[0] == "compressed-tensors" else "amd-quark"
        yield f"## With transformers\n\n`pip install transformers {package}`\n\n{_fenced('python', lines)}"
    if kind in VLLM:
        yield f"## With vLLM\n\nNot tried by fp4convert's own tests.\n\n{_fenced('sh', f'vllm serve {repo}')}"
    if kind in MLX:
        yield f"## With mlx-lm\n\n{_fenced('sh', f'mlx_lm.generate --model {repo} --prompt Hello')}"


def _has_wrong_experts(plan: Plan) -> bool:
    """True where transformers would compute garbage: it ignores the global scales of experts."""
    return format_named(plan.target.format).has_global_scale and any(
        _EXPERT.search(module) for module in plan.quantized
    )


def _kept(plan: Plan) -> Iterator[str]:
    """A line for every pattern of tensors that are not four-bit, layers folded."""
    steps = [step for step in plan.steps if step.action in ("copy", "skip")]
    counts = Counter((re.sub(r"\d+", "*", step.refs[0].name), step.reason) for step in steps)
    for (pattern, reason), count in list(counts.items())[:KEPT_LINES]:
        yield f"- {code(pattern)}: {count}, {_cell(reason)}"
    if len(counts) > KEPT_LINES:
        yield f"- {len(counts) - KEPT_LINES} patterns more, {len(steps)} tensors in all"
    if not counts:
        yield "Nothing."


def _table(rows: Iterator[tuple[object, ...]] | Sequence[Sequence[object]]) -> str:
    """Rows of markdown, the first its headings."""
    lines = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    width = lines[0].count(" | ") + 1 if lines else 0
    return "\n".join([*lines[:1], "|" + "---|" * width, *lines[1:]]) if lines else ""


def _cell(value: object) -> str:
    """A number, or words; what markdown could mean something by is code."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else code(text)
