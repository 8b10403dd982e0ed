"""Name the command that serves what a plan makes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from fp4convert.engines.files import Engine, known_engines
from fp4convert.engines.verdicts import Verdict, judge_contents
from fp4convert.errors import shell_line
from fp4convert.planning.engine_facts import class_names, plan_contents
from fp4convert.planning.steps import Plan
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.storage.source import Checkpoint

CHAT = "ForCausalLM"  # ends the class names of models that engines serve
PICTURES = "ForConditionalGeneration"  # ends those of models that answer pictures with text
# Stands where no line of an engine serves a model; a comment to a shell.
NO_LINE = "# no line serves {names}, which answers no text: see how {engine} serves such models"
# The same, of what drafts tokens for another model.
DRAFT_LINE = "# serve its model with {engine}, and name {folder} as the speculative one beside it"
HOW = {  # a row is known
    "run": "run by {proof}",
    "loaded": "its own loader took such artifacts; no model was run",
    "read": "read in its source or documentation; not run",
}


def verdict_text(verdict: Verdict, plan: Plan) -> str:
    """Say what was chosen for an engine, and how that is known."""
    target, row = plan.target, verdict.row
    made = f"{target.format} in dialect {target.dialect} with {target.activations}-bit activations"
    how = f" ({HOW[row.tried].format(proof=row.proof)})" if row else ""
    return f"for {verdict.engine.at(verdict.versions)}: {made}{how}"


def serve_lines(plan: Plan, checkpoint: Checkpoint, output: str) -> list[str]:
    """Name the command of the first engine that serves the result in a folder.

    For a model that answers no text a comment, unless a file is served.
    """
    contents = plan_contents(plan, checkpoint)
    for engine in known_engines():
        if engine.serve and judge_contents(engine, contents).loads:
            line = serve_line(engine, plan, checkpoint, output)
            return [line] if line else []
    return []


def serve_line(
    engine: Engine, plan: Plan, checkpoint: Checkpoint, output: str, source: str = ""
) -> str:
    """Return the command that loads the result, or why there is none; or "".

    source  arguments of Python that name the source's configuration
    """
    config, folder = checkpoint.config, os.path.normpath(output)
    if not folder.startswith((os.sep, os.pardir)):
        folder = os.path.join(os.curdir, folder)
    file = os.path.join(folder, plan.shards[0].file) if len(plan.shards) == 1 else ""
    if "{file}" in engine.serve:
        name = shell_line(os.path.basename(folder))
        return engine.serve.format(file=shell_line(file), name=name) if file else ""
    if engine.serve and is_draft_head(ref.name for ref in checkpoint.tensors):
        return DRAFT_LINE.format(engine=engine.name, folder=shell_line(folder))
    if engine.serve:
        is_text = any(name.endswith(CHAT) for name in class_names(config))
        if not is_text and "text_config" not in config:
            classes = ", ".join(class_names(config)) or "it"
            return NO_LINE.format(names=classes, engine=engine.name)
        return engine.serving(plan.target.kv_cache).format(output=shell_line(folder))
    lines: list[str] = []
    code = engine.class_code.get(str(plan.target.dialect), "")
    is_whole = bool(file) or "{file}" not in code
    if engine.code:
        lines = load_code(engine, config, folder)
    elif code and is_whole and source and (names := class_names(config)):
        places = {"file": json.dumps(file), "output": json.dumps(folder), "source": source}
        lines = code.strip().format(name=names[0], **places).splitlines()
    return f"python -c {shell_line('; '.join(lines))}" if lines else ""


def load_code(engine: Engine, config: Mapping[str, object], place: str) -> list[str]:
    """Return the lines of Python that load a folder or repository."""
    classes, auto = class_names(config), "AutoModel"
    if any(name.endswith(CHAT) for name in classes):
        auto += CHAT
    elif "vision_config" in config and any(name.endswith(PICTURES) for name in classes):
        auto += "ForImageTextToText"
    return engine.code.strip().format(auto=auto, output=json.dumps(place)).splitlines()
