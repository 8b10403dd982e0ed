"""Find the form in which a quantized module stays, and who holds it.

quantize --keep-packed and transcode ask the same: under which names and shapes does a dialect hold
codes and scales that nothing rounds again?
"""

from __future__ import annotations

from collections.abc import Collection

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import Format
from fp4convert.recipes.recipe import Target


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
