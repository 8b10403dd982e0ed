"""Collect the facts of a plan for engine rows; name traps and commands.

The rows are data (configs/engines); engines/verdicts.py judges them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fp4convert.checkpoint.class_table import types_inside
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.engines.files import ENGINES, Engine, read_engine
from fp4convert.engines.rows import Contents, Part
from fp4convert.engines.verdicts import find_traps, judge, trap_text
from fp4convert.errors import shell_line
from fp4convert.recipes.draft_layers import DRAFT_FORMAT, find_differing, is_draft_head
from fp4convert.recipes.recipe import model_recipe
from fp4convert.recipes.uneven_formats import EXPERTS, find_uneven, ordinary_matrices
from fp4convert.recipes.unread_modules import find_unread_modules
from fp4convert.storage.source import Checkpoint

if TYPE_CHECKING:  # inspect asks about contents, and has no plan
    from fp4convert.planning.plan import Plan
    from fp4convert.planning.steps import Step

HEAD = "a draft head"
# Speculators' own form, and the class that vLLM makes of it: configs/speculators/algos.py there.
SPECULATORS = {"speculators_model_type": "eagle3"}
EAGLE3 = "Eagle3LlamaForCausalLM"
CHAT = "ForCausalLM"  # ends the class names of models that engines serve
PICTURES = "ForConditionalGeneration"  # ends those of models that answer pictures with text
# Comments to a shell, where no command serves the result: of a model that answers no text,
# of a draft head.
NO_LINE = "# {names} answers with no text: see how {engine} serves such models"
DRAFT_LINE = "# serve its model with {engine}, and name {folder} as the speculative one beside it"


def plan_contents(plan: Plan, checkpoint: Checkpoint) -> Contents:
    """Return the facts of a plan's result that engine rows ask about."""
    steps = list(plan.steps)
    packed = [(step.form, step.module) for step in steps if step.form]
    parts = {(form.word, form.activations, EXPERTS in module) for form, module in packed}
    contents = Contents(
        str(plan.target.dialect),
        frozenset(Part(*part) for part in parts),
        is_sharded=len(plan.shards) > 1,
        is_stacked=any(
            step.form and step.linears and EXPERTS in step.linears[0].module != step.module
            for step in steps
        ),
        cache=plan.target.kv_cache,
        findings=_uneven_codes(steps, checkpoint) | _unread_codes(plan, checkpoint),
        modules=frozenset([module for _, module in packed]),
    )
    return with_model(contents, checkpoint)


def words_of_steps(steps: Iterable[Step]) -> dict[str, str]:
    """Return the word of each module's format, "" where it stays."""
    words: dict[str, str] = {}
    for step in steps:
        if step.form is None:
            words |= ordinary_matrices(step.outputs)
            continue
        word = step.form.word
        for linear in step.linears:
            words[linear.module] = word
    return words


def _uneven_codes(steps: Iterable[Step], checkpoint: Checkpoint) -> frozenset[str]:
    """Return the findings on formats that inspect would report."""
    words, recipe = words_of_steps(steps), model_recipe(checkpoint.config)
    codes = {uneven.code for uneven in find_uneven(words, recipe.groups)}
    return frozenset({*codes, *([DRAFT_FORMAT] if find_differing(words, recipe) else [])})


def _unread_codes(plan: Plan, checkpoint: Checkpoint) -> frozenset[str]:
    """Return the codes of findings that inspect would have on modules."""
    quantized = {
        linear.module: (linear.shape, step.form.format)
        for step in plan.steps
        if step.form is not None
        for linear in step.linears
    }
    recipe = model_recipe(checkpoint.config, dialect=plan.target.dialect)
    holds, judged = dialect_to_write(plan.target).TRAITS.holds_embeddings, plan.judged
    found = find_unread_modules(quantized, recipe, checkpoint.config, holds, judged.is_embedding)
    return frozenset([one.code for one in found])


def with_model(contents: Contents, checkpoint: Checkpoint) -> Contents:
    """Add the facts of config.json; a draft head has a plain Llama's."""
    config = checkpoint.config
    is_head = is_draft_head(ref.name for ref in checkpoint.tensors)
    kind = config.get("model_type", "")
    if contents.dialect and dialect_named(contents.dialect).TRAITS.container != "safetensors":
        kind = kind or next((shard.frame.architecture for shard in checkpoint.shards), "")
    is_speculators = SPECULATORS.items() <= config.items()
    return contents._replace(
        model=HEAD if is_head else str(kind),
        classes=(EAGLE3,) if is_speculators else class_names(config),
        inner=types_inside(config),
        has_code="auto_map" in config,
        files=frozenset(shard.file for shard in checkpoint.shards),
        is_diffusers="_diffusers_version" in config or "_class_name" in config,
    )


def class_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the class names of a config.json."""
    names = config.get("architectures")
    diffusers = config.get("_class_name")
    return tuple(map(str, names if isinstance(names, list) else [diffusers] if diffusers else []))


def engine_warnings(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """Return the traps of a plan, a line each.

    Rows about findings are left out: the plan reports findings itself.
    """
    failures = find_traps(plan_contents(plan, checkpoint))
    return [trap_text(engine, row) for engine, row in failures if not row.condition.findings]


def serving_engine(plan: Plan, checkpoint: Checkpoint) -> Engine | None:
    """Return the first engine with a command that serves the result."""
    contents = plan_contents(plan, checkpoint)
    engines = (engine for engine in map(read_engine, ENGINES) if engine.serve)
    return next((engine for engine in engines if judge(engine, contents).may_load), None)


def serve_line(
    engine: Engine, plan: Plan, checkpoint: Checkpoint, output: str, source: str = ""
) -> str:
    """Return the command that loads the result, or a comment; "" without one.

    source  arguments of Python that name the source's configuration
    """
    config, folder = checkpoint.config, os.path.normpath(output)
    if not folder.startswith((os.sep, os.pardir)):
        folder = os.path.join(os.curdir, folder)
    file = os.path.join(folder, plan.shards[0].file) if len(plan.shards) == 1 else ""
    if "{file}" in engine.serve:
        place = engine.place_of([ref.name for task in plan.tasks for ref in task.outputs])
        name, made = os.path.basename(folder), json.dumps(folder)
        if file:
            return engine.serve.format(file=shell_line(file), name=shell_line(name), place=place)
        program = engine.join.format(output=made, name=json.dumps(name)[1:-1], place=place)
        return f"python -c {shell_line(program)}" if program else ""
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
