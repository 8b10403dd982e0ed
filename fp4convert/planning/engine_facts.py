"""Tell what of a plan decides which engines load its result.

What engines do is data (configs/engines); the rows ask about these contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fp4convert.engines.rows import Contents, Part
from fp4convert.engines.verdicts import failures_of, trap_text
from fp4convert.recipes.draft_layers import DRAFT_FORMAT, find_differing, is_draft_head
from fp4convert.recipes.recipe import model_recipe
from fp4convert.recipes.uneven_formats import EXPERTS, find_uneven, ordinary_matrices
from fp4convert.storage.source import Checkpoint

if TYPE_CHECKING:  # inspect asks about contents, and has no plan
    from fp4convert.planning.steps import Plan, Step

HEAD = "a draft head"
# Speculators' own form, and the class that vLLM makes of it: configs/speculators/algos.py there.
SPECULATORS = {"speculators_model_type": "eagle3"}
EAGLE3 = "Eagle3LlamaForCausalLM"


def plan_contents(plan: Plan, checkpoint: Checkpoint) -> Contents:
    """Say what of a plan's result decides which engines load it."""
    steps = list(plan.steps)
    made = [(step.form, step.module) for step in steps if step.form]
    parts = {(form.word, form.activations, EXPERTS in module) for form, module in made}
    contents = Contents(
        str(plan.target.dialect),
        frozenset(Part(*part) for part in parts),
        is_sharded=len(plan.shards) > 1,
        cache=plan.target.kv_cache,
        findings=_uneven_codes(steps, checkpoint),
        modules=frozenset([module for _, module in made]),
    )
    return with_model(contents, checkpoint)


def _uneven_codes(steps: Iterable[Step], checkpoint: Checkpoint) -> frozenset[str]:
    """Return the codes of findings that inspect would have on formats."""
    words: dict[str, str] = {}
    for step in steps:
        if step.form is None:
            words |= ordinary_matrices(step.outputs)
            continue
        word = step.form.word
        for linear in step.linears:
            words[linear.module] = word
    recipe = model_recipe(checkpoint.config)
    found = {uneven.code for uneven in find_uneven(words, recipe.groups)}
    return frozenset({*found, *([DRAFT_FORMAT] if find_differing(words, recipe) else [])})


def with_model(contents: Contents, checkpoint: Checkpoint) -> Contents:
    """Add names of files, and what config.json says, which may be that of a plain Llama."""
    config = checkpoint.config
    is_head = is_draft_head(ref.name for ref in checkpoint.tensors)
    is_speculators = SPECULATORS.items() <= config.items()
    return contents._replace(
        model=HEAD if is_head else str(config.get("model_type", "")),
        classes=(EAGLE3,) if is_speculators else class_names(config),
        has_code="auto_map" in config,
        files=frozenset(shard.file for shard in checkpoint.shards),
        is_diffusers="_diffusers_version" in config or "_class_name" in config,
    )


def class_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of classes in a config.json."""
    names = config.get("architectures")
    own = config.get("_class_name")  # of Diffusers
    return tuple(map(str, names if isinstance(names, list) else [own] if own else []))


def engine_warnings(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """List what engines of the dialect are known to fail at, a line each.

    What rows say on findings is left out: the plan tells these itself.
    """
    failures = failures_of(plan_contents(plan, checkpoint))
    return [trap_text(engine, row) for engine, row in failures if not row.condition.findings]
