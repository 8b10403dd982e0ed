"""Judge an artifact for engines: collect the facts that rows ask about.

engines/verdicts.py judges, for plans as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.engines.files import Engine
from fp4convert.engines.rows import Contents, Part
from fp4convert.engines.verdicts import Verdict, judge, judge_all
from fp4convert.engines.versions import Version
from fp4convert.errors import Finding
from fp4convert.planning.engine_facts import with_model
from fp4convert.quality.fused_checks import names_fused
from fp4convert.recipes.uneven_formats import EXPERTS

MLX_STACKS = ".switch_mlp."
# Errors that do not concern engines: another source, and values that the format cannot hold.
OF_SOURCE = ("source-differs", "weights-underflow")


def artifact_contents(artifact: Artifact, findings: Sequence[Finding]) -> Contents:
    """Return the facts of an artifact that engine rows ask about."""
    modules = artifact.packed
    errors = (one for one in findings if one.level == "error" and one.code not in OF_SOURCE)
    parts = {
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
        frozenset(Part(word, bits, is_expert) for word, bits, is_expert in parts),
        is_sharded=len(artifact.source.checkpoint.shards) > 1,
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


def check_engine(
    artifact: Artifact, findings: Sequence[Finding], asked: tuple[Engine, Version | None] | None
) -> list[Finding]:
    """Report that an engine does not load an artifact.

    "Nobody knows" is an error, too: quantize --for makes no such artifact.
    asked  the engine and version of --for; None without one
    """
    if asked is None:
        return []
    engine, version = asked
    verdict = judge(engine, artifact_contents(artifact, findings), version)
    if verdict.loads:
        return []
    instead = verdict.instead
    if instead and artifact.dialect not in engine.dialects:  # not every transcode is lossless
        instead = f"quantize the source with --for {engine.key}"
    detail = "; ".join(filter(None, (verdict.reason(version), instead)))
    if verdict.loads is None:
        return [Finding("error", "engine-unknown", None, detail)]
    return [Finding("error", "engine-refuses", None, detail)]
