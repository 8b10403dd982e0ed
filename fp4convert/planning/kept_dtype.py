"""Choose the type of matrices that stay; write them in it.

A matrix that is packed and stays becomes bf16, or what --keep-dtype says.  One of float32 becomes
that, too; for Q8_0, which GGUF files alone hold, also one of 16 bits.  Vectors cost little, and
routers decide by small differences: both stay as they are, and so does what llama.cpp reads as
floats alone.  What has no whole blocks never becomes Q8_0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import FLOATS
from fp4convert.checkpoint.error_report import is_norm
from fp4convert.errors import ChoiceError
from fp4convert.makers.copied import Copied
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import FLOAT_TYPES, Format, dtype_named
from fp4convert.planning.plan import Idle
from fp4convert.planning.steps import Action, Draft, Step, Task, module_of, spec_of
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import Recipe, Target
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec, nbytes_of

if TYPE_CHECKING:
    from fp4convert.checkpoint.linears import Linears
    from fp4convert.checkpoint.unreadable import Aside

KEPT_DTYPE = "bf16"  # of what was packed and stays


def is_expanded(linear: Linear) -> bool:
    """Return whether no engine would read a module that stays packed."""
    return linear.coding.is_packed and not linear.coding.is_at_home


def word_of(dtype: str) -> str:
    """Return the name for people of the type of a matrix that stays."""
    return FLOAT_TYPES[dtype].word if dtype in FLOAT_TYPES else dtype.lower()


def expanded_spec(name: str, shape: tuple[int, ...], recipe: Recipe) -> TensorSpec:
    """Return the spec of a packed matrix that stays and is expanded."""
    from fp4convert.storage.gguf import BLOCK_TYPES, Q8_0, shape_in_bytes

    word = recipe.target.keep_dtype or KEPT_DTYPE
    if word != Q8_0.lower():
        return TensorSpec(name, dtype_named(word), shape)
    if (
        _is_router(name, recipe)
        or _is_of_floats(name, recipe)
        or shape[-1] % BLOCK_TYPES[Q8_0].block_size
    ):
        return TensorSpec(name, dtype_named(KEPT_DTYPE), shape)
    return TensorSpec(name, Q8_0, shape_in_bytes(Q8_0, shape))


def _is_router(name: str, recipe: Recipe) -> bool:
    return recipe.kind_of(module_of(name)) == "router"


def _is_of_floats(name: str, recipe: Recipe) -> bool:
    return matches_any(dialect_to_write(recipe.target).TRAITS.floats, name)


def kept_spec(ref: TensorRef, recipe: Recipe) -> TensorSpec:
    """Return the spec of a stored tensor that stays; often the same."""
    target, same = recipe.target, spec_of(ref)
    is_matrix = len(ref.shape) >= MATRIX_DIMENSIONS and ref.elements > 0
    if target.keep_dtype is None or not is_matrix:
        return same
    from fp4convert.storage.gguf import Q8_0

    is_q8_0 = target.keep_dtype == Q8_0.lower()
    if ref.dtype not in (FLOAT_TYPES if is_q8_0 else ("F32",)) or _is_router(ref.name, recipe):
        return same
    if _is_of_floats(ref.name, recipe):
        return same
    made = expanded_spec(ref.name, ref.shape, recipe)
    return same if is_q8_0 and made.dtype != Q8_0 else made


def kept_nbytes(linear: Linear, recipe: Recipe) -> int:
    """Count the bytes of a linear layer that stays."""
    if is_expanded(linear):
        spec = expanded_spec(linear.module + WEIGHT, linear.shape, recipe)
        return nbytes_of(spec.dtype, spec.shape)
    spec = kept_spec(linear.home, recipe)
    if linear.coding.is_packed or spec.dtype == linear.home.dtype:
        return linear.nbytes
    members = linear.home.elements // math.prod(linear.shape)
    return nbytes_of(spec.dtype, spec.shape) // members


def narrowed(ref: TensorRef, recipe: Recipe) -> str:
    """Name the types of a matrix before and after."""
    return f"{FLOAT_TYPES[ref.dtype].word} becomes {recipe.target.keep_dtype}"


def keep_tensor(ref: TensorRef, action: Action, reason: str, recipe: Recipe | None) -> Draft:
    """Draft the step of a tensor that stays, or becomes --keep-dtype."""
    spec = kept_spec(ref, recipe) if recipe else spec_of(ref)
    if recipe is None or spec.dtype == ref.dtype:
        return copy_as(action, reason, (ref,), spec)
    shape = ref.shape[0], ref.elements // ref.shape[0]
    whole = Linear(module_of(ref.name), shape, FLOATS[ref.dtype], (ref,))
    draft = draft_floats(action, f"{reason}; {narrowed(ref, recipe)}", whole, spec)
    return draft._replace(step=draft.step._replace(shape=()))


def carry_unread(aside: Aside, recipe: Recipe) -> Draft:
    """Draft the step of an unreadable tensor, in its recorded form."""
    ref, form = aside.ref, aside.form
    reason = recipe.reason_to_keep(module_of(ref.name)) or ""
    draft = copy_as("copy", f"{reason}; carried unread", (ref,), spec_of(ref))
    return draft._replace(step=draft.step._replace(form=form, shape=ref.shape if form else ()))


def scales_of_tables(linears: Linears, made: Collection[str]) -> set[str]:
    """Return the names of scales of tables that stay as they are."""
    tables = (one for name, one in linears.of.items() if one.coding.is_at_home and name not in made)
    return {ref.name for table in tables for ref in table.refs[1:]}


def copy_as(
    action: Action,
    reason: str,
    refs: tuple[TensorRef, ...],
    spec: TensorSpec,
    shape: tuple[int, ...] = (),
) -> Draft:
    """Draft the step of stored bytes that are copied, under any name."""
    is_watched = is_norm(spec.name) and all(ref.dtype in FLOAT_DTYPES for ref in refs)
    maker = Copied(spec.name, refs, is_watched)
    step = Step(action, reason, module_of(spec.name), maker, refs, shape)
    return Draft(step, (spec,))


def draft_floats(action: Action, reason: str, linear: Linear, spec: TensorSpec) -> Draft:
    """Draft the step of a linear layer whose values become an ordinary tensor."""
    from fp4convert.makers.floats import Floats

    maker, linears = Floats(spec, (linear,)), (linear,)
    words = action, reason, module_of(spec.name)
    return Draft(Step(*words, maker, linear.refs, linear.shape, linears=linears), (spec,))


def idle_keep_dtype(recipe: Recipe, tasks: Iterable[Task]) -> Iterator[Idle]:
    """Report --keep-dtype where no tensor gets another type."""
    steps = (step for task in tasks for step in task.steps if step.linears and not step.is_made)
    if recipe.target.keep_dtype and all(
        step.outputs[0].dtype == step.refs[0].dtype for step in steps
    ):
        from fp4convert.storage.gguf import Q8_0

        wide = "" if recipe.target.keep_dtype == Q8_0.lower() else "fp32 "
        why = f"is for {wide}matrices and packed ones that stay; here are none"
        yield Idle("--keep-dtype", why, is_pattern=False)


def held_form(linear: Linear, target: Target, beside: Collection[Format] = ()) -> Form | None:
    """Return the form in which the target's dialect holds a module as it is.

    beside   formats of other modules in the same artifact
    Returns  None where it has no place for it
    """
    dialect = dialect_named(str(target.dialect))
    form, traits = linear.coding.form_kept(linear, target), dialect.TRAITS
    if form is None or form.format not in (*traits.writes, *traits.mixes):
        return None
    formats = {form.format, *beside}
    if len(formats) > 1 and not formats <= set(traits.mixes):
        return None
    return None if dialect.unfit(linear.module, linear.shape, form) else form


def unheld(
    linear: Linear, target: Target, next_step: str, beside: Collection[Format] = ()
) -> ChoiceError:
    """Make the error for a module that the dialect cannot hold as it is.

    It names the dialects that can.
    """
    able = [
        name
        for name in DIALECTS
        if held_form(linear, target._replace(dialect=name, scale_layout=None), beside)
    ]
    others = sorted({fmt.name for fmt in beside} - {linear.coding.word.partition(" ")[0]})
    together = f" beside {' and '.join(others)}" if others else ""
    detail = f"{linear.name} is {linear.coding.word}, which dialect {target.dialect} cannot hold"
    detail = f"{detail}{together}; held as it is by {', '.join(able) or 'no dialect'}"
    return ChoiceError("dialect-mixed", detail, next_step, linear.name)
