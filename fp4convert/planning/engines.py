"""Say what engines do with a plan's result: warnings, and what serves it.

What engines do is data (configs/engines, read by recipes/engines.py); here a plan becomes the
contents that its rows ask about.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fp4convert.errors import shell_line
from fp4convert.planning.steps import Plan
from fp4convert.recipes.engines import (
    EXPERTS,
    Contents,
    Engine,
    Part,
    Verdict,
    judge_contents,
    known_engines,
    trap_text,
    traps_of,
)
from fp4convert.storage.source import Checkpoint

CHAT = "ForCausalLM"  # ends the class names of models that engines serve
HOW = {  # a row is known
    "run": "this repository's tests run it",
    "loaded": "its own loader took such artifacts (make engines); no model was run",
    "read": "read in its source or documentation; not run",
}
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|mtp_layers)\.")  # in names of layers that draft tokens


def contents_of(plan: Plan, checkpoint: Checkpoint) -> Contents:
    """Say what of a plan's result decides which engines load it."""
    steps = list(plan.steps)
    made = {(step.form.word, step.form.activations, step.module) for step in steps if step.form}
    kept = (step.refs[0].name for step in steps if step.action in ("copy", "skip"))
    contents = Contents(
        str(plan.target.dialect),
        frozenset(Part(word, bits, EXPERTS in module) for word, bits, module in made),
        is_sharded=len(plan.shards) > 1,
        has_cache=plan.target.kv_cache is not None,
    )
    return of_model(contents, checkpoint.config, kept)


def of_model(contents: Contents, config: Mapping[str, object], kept: Iterable[str]) -> Contents:
    """Add what config.json says, and what of drafting layers stays.

    kept  names of tensors that are not quantized
    """
    return replace(
        contents,
        model=str(config.get("model_type", "")),
        classes=class_names(config),
        is_diffusers="_diffusers_version" in config or "_class_name" in config,
        keeps_draft=any(EXPERTS in name and _DRAFT.search(name) for name in kept),
    )


def class_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of classes in a config.json."""
    names = config.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def engine_warnings(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """List what engines of the dialect are known to fail at, a line each."""
    return [trap_text(*trap) for trap in traps_of(contents_of(plan, checkpoint))]


def verdict_text(verdict: Verdict, plan: Plan) -> str:
    """Say what was chosen for an engine, and how that is known."""
    target, row = plan.target, verdict.row
    name = " ".join(filter(None, (verdict.engine.name, verdict.versions)))
    made = f"{target.format} in dialect {target.dialect} with {target.activations}-bit activations"
    return f"for {name}: {made} ({HOW[row.tried]})" if row else f"for {name}: {made}"


def serve_lines(plan: Plan, checkpoint: Checkpoint, output: str) -> list[str]:
    """Name the command of the first engine that serves the result in a folder.

    None for a model that answers no text, unless a file is served.
    """
    contents = contents_of(plan, checkpoint)
    for engine in known_engines():
        if engine.serve and judge_contents(engine, contents).loads:
            line = serve_line(engine, plan, checkpoint, output)
            return [line] if line else []
    return []


def serve_line(engine: Engine, plan: Plan, checkpoint: Checkpoint, output: str) -> str:
    """Return the command that loads the result; "" where there is none."""
    config, folder = checkpoint.config, os.path.normpath(output)
    if not folder.startswith((os.sep, os.pardir)):
        folder = os.path.join(os.curdir, folder)
    if "{file}" in engine.serve:
        if len(plan.shards) != 1:
            return ""
        file = shell_line(os.path.join(folder, plan.shards[0].file))
        return engine.serve.format(file=file, name=shell_line(os.path.basename(folder)))
    if engine.serve:
        is_text = any(name.endswith(CHAT) for name in class_names(config))
        if not is_text and "text_config" not in config:
            return ""
        cache = f" {engine.cache}" if engine.cache and plan.target.kv_cache else ""
        return engine.serve.format(output=shell_line(folder)) + cache
    if engine.code:
        return f"python -c {shell_line('; '.join(load_code(engine, config, folder)))}"
    return ""


def load_code(engine: Engine, config: Mapping[str, object], place: str) -> list[str]:
    """Return the lines of Python that load a folder or repository."""
    is_causal = any(name.endswith(CHAT) for name in class_names(config))
    auto = f"AutoModel{CHAT if is_causal else ''}"
    return engine.code.strip().format(auto=auto, output=json.dumps(place)).splitlines()
