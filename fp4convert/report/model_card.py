"""Write the model card of a pushed artifact.

Decides what of the source's own card travels: its licence, languages and task, and its text below
ours.  Whatever a checkpoint says stands in code spans, where markdown and HTML mean nothing.  The
card is no part of the artifact's digest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fp4convert.errors import shell_line
from fp4convert.execution.settings import Result
from fp4convert.numerics.formats import format_named
from fp4convert.planning.steps import Plan
from fp4convert.report.text import spell
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.source import Source

# Words of the source's front matter.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
WORD_LIMIT = 300  # characters of such a word
CARD_LIMIT = 1 << 20  # bytes of the source's card
KEPT_LINES = 40
# Options that may name files of this machine: their names alone are told.
PATHS = ("calibration", "input_scale", "recipe")
CAUSAL = "ForCausalLM"
TRANSFORMERS = {  # docs/engines.md says why
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "mxfp4"),
    ("quark", "mxfp4"),
}
VLLM = TRANSFORMERS | {("modelopt", "nvfp4")}
MLX = {("mlx", "nvfp4"), ("mlx", "mxfp4")}
_PLAIN = re.compile(r"(?!.*www)[A-Za-z0-9 ,.:'()+-]*")
_EXPERT = re.compile(r"\.experts\.\d")  # transformers ignores global scales there


@dataclass(frozen=True, slots=True)
class CardRequest:
    """What a card is for.

    repo     where it goes
    options  of the command that makes the artifact again: words with their values; one that is None
             was not given
    errors   rows of a table, the first its headings; None where nothing was measured
    """

    repo: str
    options: Mapping[str, object]
    errors: Sequence[Sequence[object]] | None = None


def make_card(plan: Plan, result: Result, source: Source, request: CardRequest) -> str:
    """Return the text of README.md."""
    known, body = _read_own_card(source)
    checkpoint = source.checkpoint
    at = f" at commit {code(checkpoint.revision)}" if checkpoint.revision else ""
    made = f"{len(plan.quantized)} linear layers in {plan.target.format.upper()}"
    parts = [
        f"# {code(request.repo.rpartition('/')[2])}",
        f"{code(checkpoint.repo or source.name)}{at}, {made}, "
        f"made by fp4convert {version('fp4convert')}.",
        _table(list(_facts(plan, result))),
        "## How it was made",
        _fence("sh", _command(source, request.options)),
        *_loading(plan, source, request.repo),
        *([] if request.errors is None else ["## Errors", _table(request.errors)]),
        "## What is not quantized",
        "\n".join(_kept_lines(plan)),
        *(["## The model card of the source", body] if body else []),
    ]
    return f"---\n{_front_matter(plan, source, known)}\n---\n\n" + "\n\n".join(parts) + "\n"


def code(text: object) -> str:
    """Write a code span that ends where it is meant to, in a table too.

    What is not printable shows as \\xNN.
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
    kind = (target.dialect, target.format)
    if kind in TRANSFORMERS and checkpoint.config.get("architectures"):
        ours["library_name"] = "transformers"
    elif kind in MLX:
        ours["library_name"] = "mlx"
    tags = ["fp4convert", target.format, str(target.dialect)]
    return str(ModelCardData(**known, **ours, tags=tags, ignore_metadata_errors=True).to_yaml())


def _read_own_card(source: Source) -> tuple[dict[str, Any], str]:
    """Read what travels of the source's front matter, and the text below."""
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
    """Yield rows that say what the artifact is."""
    target = plan.target
    fmt = format_named(target.format)
    wide = ", a float32 global scale" if fmt.has_global_scale else ""
    blocks = f"{fmt.block_size} to a block, {fmt.scale_dtype} block scales"
    yield "", ""
    yield "format", f"{fmt.name}: E2M1 codes, {blocks}{wide}"
    yield "dialect", target.dialect
    yield "scale rule", target.rule_for(fmt)
    if target.method not in (None, "rtn"):
        yield "method", target.method
    is_wide = target.activations == 16
    yield "activations", "16 bits" if is_wide else "4 bits: engines quantize them, too"
    if target.kv_cache:
        yield "cache of keys and values", "FP8, with a scale for each attention's keys and values"
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
    """Write a block of code that ends where it is meant to."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _loading(plan: Plan, source: Source, repo: str) -> Iterator[str]:
    """Yield a heading and an example for each engine known to load it."""
    target, config = plan.target, source.checkpoint.config
    kind = (str(target.dialect), target.format)
    if source.checkpoint.components or "_class_name" in config:
        return  # of Diffusers, which loads none of these folders: docs/diffusers.md
    # transformers ignores the global scales of experts, and would compute garbage.
    has_wrong_experts = format_named(target.format).has_global_scale and any(
        map(_EXPERT.search, plan.quantized)
    )
    architectures = config.get("architectures")
    if kind in TRANSFORMERS and architectures and not has_wrong_experts:
        names = architectures if isinstance(architectures, list) else []
        is_causal = any(str(name).endswith(CAUSAL) for name in names)
        model = f"AutoModel{CAUSAL}" if is_causal else "AutoModel"
        lines = (
            f"from transformers import {model}\n\n"
            f'model = {model}.from_pretrained("{repo}", dtype="auto")'
        )
        package = "compressed-tensors" if kind[0] == "compressed-tensors" else "amd-quark"
        install = f"`pip install transformers {package}`"
        yield f"## With transformers\n\n{install}\n\n{_fence('python', lines)}"
    if kind in VLLM:
        example = _fence("sh", f"vllm serve {repo}")
        yield f"## With vLLM\n\nNot tried by fp4convert's own tests.\n\n{example}"
    if kind in MLX:
        example = _fence("sh", f"mlx_lm.generate --model {repo} --prompt Hello")
        yield f"## With mlx-lm\n\n{example}"


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
    """Write a number, or words; as code where markdown could read them."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else code(text)
