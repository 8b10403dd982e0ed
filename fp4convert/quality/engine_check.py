"""Judge an artifact, anyone's, by the engines that load it.

The rows of configs/engines say what an engine loads. Modules that engines load as one matrix have
to have one format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form, with_fused
from fp4convert.checkpoint.encodings.floats import DOUBLE
from fp4convert.checkpoint.modules import form_finder
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FLOAT_TYPES, FP8, MXFP4
from fp4convert.planning.engine_contents import with_model
from fp4convert.recipes.draft_layers import find_differing
from fp4convert.recipes.engine_rows import Contents, Part
from fp4convert.recipes.engine_verdicts import Verdict, judge_contents
from fp4convert.recipes.engine_versions import Version
from fp4convert.recipes.engines import Engine, known_engines
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.uneven_formats import (
    EXPERTS,
    EXPERTS_IN_PART,
    GROUP_IN_PART,
    Uneven,
    find_uneven,
    ordinary_matrices,
)
from fp4convert.storage.safetensors import WEIGHT

MLX_STACKS = ".switch_mlp."
# What a matrix is that the record does not tell of, by the dtype of its weight.
PACKED_WORDS = {"I8": MXFP4.name, "U8": "four-bit", "F8_E4M3": FP8.name}


def artifact_contents(artifact: Artifact, findings: Sequence[Finding]) -> Contents:
    """Say what of an artifact decides which engines load it."""
    modules = artifact.packed
    made = {
        # rows on experts of the dialect mlx are about those that stand one by one
        (
            packed.form.word,
            packed.form.activations,
            EXPERTS in module and MLX_STACKS not in packed.stem,
        )
        for module, packed in modules.items()
    }
    contents = Contents(
        artifact.dialect,
        frozenset(Part(word, bits, is_expert) for word, bits, is_expert in made),
        is_sharded=len(artifact.source.checkpoint.shards) > 1,
        cache=artifact.forms[0].kv_cache,
        findings=frozenset(finding.code for finding in findings),
        names_fused=names_fused(artifact),
        modules=frozenset(modules),
    )
    return with_model(contents, artifact.source.checkpoint)


def judge_by_engines(artifact: Artifact, findings: Sequence[Finding]) -> list[Verdict]:
    """Tell which engines load an artifact, in the order of ENGINES."""
    contents = artifact_contents(artifact, findings)
    return [_judge(engine, None, contents, findings) for engine in known_engines()]


def check_engine(
    artifact: Artifact, findings: Sequence[Finding], asked: tuple[Engine, Version | None] | None
) -> list[Finding]:
    """Find that the engine asked for does not load an artifact.

    An error where nobody knows, too: quantize --for makes nothing of that kind.
    """
    if asked is None:
        return []
    engine, version = asked
    verdict = _judge(engine, version, artifact_contents(artifact, findings), findings)
    if verdict.loads:
        return []
    instead = verdict.instead
    if instead and artifact.dialect not in engine.dialects:  # not every transcode is lossless
        instead = f"quantize the source with --for {engine.key}"
    detail = "; ".join(filter(None, (verdict.reason(version), instead)))
    if verdict.loads is None:
        return [Finding("error", "engine-unknown", None, detail)]
    return [Finding("error", "engine-refuses", None, detail)]


def _judge(
    engine: Engine, version: Version | None, contents: Contents, findings: Sequence[Finding]
) -> Verdict:
    """Judge contents; nothing loads as it should where findings are errors.

    Another source than its own, and values that its format cannot hold, are none of the engine's.
    """
    verdict = judge_contents(engine, contents, version)
    of_source = ("source-differs", "weights-underflow")
    errors = [one for one in findings if one.level == "error" and one.code not in of_source]
    if verdict.loads is False or not errors:
        return verdict
    first = f"{errors[0].code}: {errors[0].detail}"
    return Verdict(engine, "", False, f"has an artifact with errors before it: {first}")


def check_fused(artifact: Artifact, recipe: Recipe) -> Iterator[Finding]:
    """Check the experts of every layer, every scale group, and draft layers."""
    packed = artifact.packed
    stored = {ref.name for one in packed.values() for ref in one.refs}
    others = [ref for name, ref in artifact.tensors.items() if name not in stored]
    kept = (ref for ref in others if ref.dtype in (*FLOAT_TYPES, DOUBLE))
    words = {**ordinary_matrices(kept), **{name: one.form.word for name, one in packed.items()}}
    unread = {
        ref.name.removesuffix(WEIGHT): PACKED_WORDS[ref.dtype]
        for ref in others
        if ref.dtype in PACKED_WORDS and ref.name.endswith(WEIGHT)
    }
    for differing in find_differing({**unread, **words}, recipe):
        detail = f"{differing}; {differing.consequence}"
        module = differing.modules[0]
        yield Finding("note" if differing.is_note else "warning", "draft-format", module, detail)
    # One finding for each kind: a model has as many as layers.
    first: dict[tuple[str, ...], list[Uneven]] = {}
    for uneven in find_uneven(words, recipe.groups):
        if uneven.code != GROUP_IN_PART or artifact.spelling.TRAITS.shares_scales:
            first.setdefault((uneven.code, *uneven.modules), []).append(uneven)
    yield from map(_finding, first.values())


def _finding(found: list[Uneven]) -> Finding:
    where = found[0]
    more = f", and so in {len(found) - 1} other layers" if len(found) > 1 else ""
    detail = f"{where}{more}"
    module = next(modules[0] for word, modules in where.modules.items() if word)
    if where.code == EXPERTS_IN_PART:
        detail += "; engines that load the experts of a layer together read all as the first"
        return Finding("warning", "experts-in-part", module, detail)
    if where.code == GROUP_IN_PART:
        detail += "; engines that fuse them do not load one with the other"
        return Finding("warning", "group-in-part", module, detail)
    detail += "; engines that fuse them refuse the artifact"
    return Finding("error", "group-forms-differ", module, detail)


def names_fused(artifact: Artifact) -> bool:
    """Tell whether records name fused matrices as they name the parts.

    Engines that know no parts look for qkv_proj and gate_up_proj, to be quantized or kept.  Of a
    record whose patterns cannot be read nothing is said: that is a finding of its own.
    """
    is_broken = any(finding.code == "ignore-pattern" for finding in artifact.findings)
    if is_broken or not artifact.spelling.TRAITS.ignores_by_name:
        return True
    form_of = form_finder(artifact.spelling.recognise(artifact.clues))
    is_ignored = artifact.spelling.ignores(artifact.clues)

    def said(module: str) -> Form | str | None:
        return "kept" if is_ignored(module) else form_of(module)

    weights = (name.removesuffix(WEIGHT) for name in artifact.tensors if name.endswith(WEIGHT))
    alike: dict[Form | str | None, list[str]] = defaultdict(list)
    for module in dict.fromkeys((*artifact.packed, *weights)):
        if EXPERTS not in module:
            alike[said(module)].append(module)
    return all(
        said(whole) == words
        for words, modules in alike.items()
        for whole in with_fused(modules)[len(modules) :]
    )
