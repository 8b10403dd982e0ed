"""Warn of engines that do not load a plan; name the next commands.

What engines do is data: configs/engines/*.toml, one file for each.  A [[trap]] is told where all
that it names is so: dialects, formats, models (globs on model_type), has_experts or has_others
(four-bit modules of these formats inside or outside of experts), is_diffusers, is_sharded,
activations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from fp4convert.errors import shell_line
from fp4convert.planning.steps import Plan
from fp4convert.storage.source import Checkpoint

EXPERTS = ".experts."  # in the name of a module; not of shared experts, which are like other MLPs
CHAT = "ForCausalLM"  # ends the class names of models that engines serve


@cache
def known_engines() -> tuple[Mapping[str, Any], ...]:
    """Read configs/engines/*.toml, in the order of their names."""
    import tomllib
    from importlib.resources import files

    folder = files("fp4convert").joinpath("configs").joinpath("engines")
    found = sorted((item for item in folder.iterdir()), key=lambda item: item.name)
    return tuple(
        tomllib.loads(item.read_text(encoding="utf-8"))
        for item in found
        if item.name.endswith(".toml")
    )


def engine_warnings(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """List what engines of the dialect are known not to load, a line each."""
    made = _blocks_in(plan)
    return [
        f"{' '.join(filter(None, (engine['name'], trap.get('versions'))))} {trap['says']};"
        f" {trap['next']}"
        for engine in known_engines()
        for trap in _traps(engine, made, plan, checkpoint)
    ]


def _blocks_in(plan: Plan) -> set[tuple[str, bool]]:
    """Return the four-bit formats of modules, and whether these are experts."""
    return {
        (step.format, EXPERTS in step.module)
        for step in plan.steps
        if step.form and step.form.format.is_fp4
    }


def _traps(
    engine: Mapping[str, Any], made: set[tuple[str, bool]], plan: Plan, checkpoint: Checkpoint
) -> Iterator[Mapping[str, Any]]:
    """Find the traps of an engine that a plan falls into.

    made  what _blocks_in found
    """
    config, target = checkpoint.config, plan.target
    model, facts = (
        str(config.get("model_type", "")),
        {
            "is_diffusers": "_diffusers_version" in config or "_class_name" in config,
            "is_sharded": len(checkpoint.shards) > 1,
            "activations": target.activations,
        },
    )
    for trap in engine.get("trap", ()):
        formats = trap.get("formats", [name for name, _ in made])
        where = {is_expert for name, is_expert in made if name in formats}
        models = trap.get("models")
        if (
            target.dialect in trap["dialects"]
            and where
            and (True in where or not trap.get("has_experts"))
            and (False in where or not trap.get("has_others"))
            and (models is None or any(fnmatchcase(model, glob) for glob in models))
            and all(trap[key] == value for key, value in facts.items() if key in trap)
        ):
            yield trap


def serve_lines(plan: Plan, checkpoint: Checkpoint, output: str) -> list[str]:
    """Name the commands of engines that serve the artifact in a folder.

    None for an engine that is known not to load it, or for a model that answers no text.
    """
    classes = checkpoint.config.get("architectures") or ()
    texts = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    is_text = any(name.endswith(CHAT) for name in texts) or "text_config" in checkpoint.config
    folder = os.path.normpath(output)
    if not folder.startswith((os.sep, os.pardir)):
        folder = os.path.join(os.curdir, folder)
    files = plan.shards
    place = shell_line(os.path.join(folder, files[0].file)) if len(files) == 1 else ""
    found, made = [], _blocks_in(plan)
    for engine in known_engines():
        line = engine.get("serve", {}).get(plan.target.dialect, "")
        if not line or any(_traps(engine, made, plan, checkpoint)):
            continue
        if "{file}" in line and place:
            found.append(line.format(file=place, name=shell_line(os.path.basename(folder))))
        elif "{file}" not in line and is_text:
            found.append(line.format(output=shell_line(folder)))
    return found
