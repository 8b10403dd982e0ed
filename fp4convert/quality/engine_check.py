"""Judge an artifact for engines: collect the facts that rows ask about.

engines/verdicts.py judges, for plans as well. Modules that engines load as one matrix have to have
one format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form, with_fused
from fp4convert.checkpoint.encodings.floats import DOUBLE
from fp4convert.checkpoint.modules import form_finder
from fp4convert.engines.files import Engine, EngineAt
from fp4convert.engines.rows import Contents, Part
from fp4convert.engines.verdicts import Verdict, judge, judge_all
from fp4convert.engines.versions import Version
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FLOAT_TYPES, FP8, MXFP4
from fp4convert.planning.engine_facts import with_model
from fp4convert.recipes.draft_layers import find_differing
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

# Errors that do not concern engines: another source, and values that the format cannot hold.
OF_SOURCE = ("source-differs", "weights-underflow")
# The format of a matrix that the record leaves out, by the dtype of its weight.
PACKED_WORDS = {"I8": MXFP4.name, "U8": "four-bit", "F8_E4M3": FP8.name}


def artifact_contents(artifact: Artifact, findings: Sequence[Finding]) -> Contents:
    """Return the facts of an artifact that engine rows ask about."""
    modules = artifact.packed
    errors = (one for one in findings if one.level == "error" and one.code not in OF_SOURCE)
    parts = set[tuple[str, int, bool]]()
    for module, packed in modules.items():
        # Rows on experts of the dialect mlx are about those that stand one by one.
        is_stack = artifact.spelling.TRAITS.has_own_stacks and packed.stem != module
        is_expert = EXPERTS in module and not is_stack
        parts.add((packed.form.word, packed.form.activations, is_expert))
    contents = Contents(
        artifact.dialect,
        frozenset(Part(*part) for part in parts),
        is_sharded=len(artifact.source.checkpoint.shards) > 1,
        is_stacked=any(EXPERTS in name and one.stem != name for name, one in modules.items()),
        cache=artifact.forms[0].kv_cache,
        findings=frozenset(finding.code for finding in findings),
        names_fused=names_fused(artifact),
        modules=frozenset(modules),
        fault=next((f"{error.code}: {error.detail}" for error in errors), ""),
    )
    return with_model(contents, artifact.source.checkpoint)


def judge_by_engines(artifact: Artifact, findings: Sequence[Finding]) -> list[Verdict]:
    """Judge an artifact for every engine, in the order of ENGINES."""
    return judge_all(artifact_contents(artifact, findings))


def check_engines(
    artifact: Artifact, findings: Sequence[Finding], asked: Iterable[EngineAt]
) -> list[Finding]:
    """Report engines that do not load an artifact.

    "Nobody knows" is an error, too: quantize --for makes no such artifact.
    asked  the engines and versions of --for
    """
    return [one for each in asked for one in _check_engine(artifact, findings, *each)]


def _check_engine(
    artifact: Artifact, findings: Sequence[Finding], engine: Engine, version: Version | None
) -> list[Finding]:
    """Report that an engine does not load an artifact."""
    verdict = judge(engine, artifact_contents(artifact, findings), version)
    if verdict.may_load:
        return []
    instead = verdict.instead
    if instead and artifact.dialect not in engine.dialects:  # not every transcode is lossless
        instead = f"quantize the source with --for {engine.key}"
    detail = "; ".join(filter(None, (verdict.reason(version), instead)))
    if verdict.loads is None:
        return [Finding("error", "engine-unknown", None, detail)]
    return [Finding("error", "engine-refuses", None, detail)]


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
    """Tell whether records treat qkv_proj and gate_up_proj like their parts.

    True for patterns that cannot be read, which is another finding.
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
