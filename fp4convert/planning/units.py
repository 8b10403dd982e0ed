"""Gather modules into units, and draft their steps.

A unit is written by one maker: the members of a scale group in one shard, or a matrix of the
dialect that holds several modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.base import Dialect, whole
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.makers.table import maker_of
from fp4convert.makers.unit import Stem, Unit
from fp4convert.planning.decisions import Verdict
from fp4convert.planning.steps import Draft, Step
from fp4convert.recipes.recipe import ScaleGroup, Target, gather_groups

if TYPE_CHECKING:
    from fp4convert.makers.maker import Maker


class Units:
    """Drafts the steps of modules that are quantized in the result.

    inputs  multipliers of activations, by module
    amaxes  of global scales that a file gives, by module
    shapes  of every matrix or stack that is written, by its stem
    """

    def __init__(
        self,
        verdicts: Mapping[str, Verdict],
        dialect: Dialect,
        target: Target,
        *,
        inputs: Mapping[str, float],
        amaxes: Mapping[str, float],
    ) -> None:
        self.verdicts, self._dialect = verdicts, dialect
        self._target, self._amaxes = target, amaxes
        made = {module: verdict for module, verdict in verdicts.items() if verdict.is_made}
        sizes = {module: verdict.linear.shape for module, verdict in made.items()}
        self.shapes = dialect.stems(sizes)
        self._linears = {module: self._laid_over(verdict) for module, verdict in made.items()}
        groups = gather_groups({module: verdict.group for module, verdict in made.items()})
        self._members = {
            group: tuple([self._linears[module] for module in modules])
            for group, modules in groups.items()
            if group is not None
        }
        self._labels = {
            group: _label(group, members)
            for group, members in self._members.items()
            if len(members) > 1
        }
        # Stems by the module whose place they take, and the stems of each unit.
        self._stems: dict[str, Stem] = {}
        self._beside: dict[object, list[Stem]] = {}
        for name, shape in self.shapes.items():
            slots = whole(name, shape) if name in sizes else dialect.slots(name, shape)
            modules = list(dict.fromkeys([rows.module for slot in slots for rows in slot]))
            scales = [inputs[module] for module in modules if module in inputs]
            stem = Stem(name, shape, slots, (max(scales),) if scales else ())
            self._stems[modules[0]] = stem
            self._beside.setdefault(self._key(stem, modules[0]), []).append(stem)
        self._makers: dict[object, Maker] = {}

    def draft(self, module: str) -> Iterator[Draft]:
        """Draft the step of the stem that takes a module's place, if any."""
        stem = self._stems.get(module)
        if stem is None:
            return
        verdict = self.verdicts[module]
        if verdict.form is None:
            raise RuntimeError(f"{module} stays")
        key = self._key(stem, module)
        if key not in self._makers:
            self._makers[key] = maker_of(self._unit(tuple(self._beside[key]), verdict))
        modules = list(dict.fromkeys(chain.from_iterable(stem.members)))
        linears = tuple([self.verdicts[one].linear for one in modules])
        refs = linears[0].refs if len(linears) == 1 else ()
        step = Step(
            verdict.action,
            verdict.reason,
            stem.name,
            self._makers[key],
            refs or tuple([ref for linear in linears for ref in linear.refs]),
            stem.shape,
            verdict.form,
            self._labels.get(verdict.group) if verdict.group else None,
            linears,
        )
        amaxes = [self._amaxes[one] for one in modules if one in self._amaxes]
        specs = self._dialect.outputs(stem.name, stem.shape, verdict.form)
        yield Draft(step, specs, next(iter(stem.input_scales), None), tuple(amaxes))

    def _key(self, stem: Stem, module: str) -> object:
        """Return the key of a stem's unit."""
        verdict = self.verdicts[module]
        if stem.name != module or verdict.group is None:
            return stem.name
        format_name = verdict.form.format.name if verdict.form else ""
        return verdict.group, verdict.linear.home.file, format_name, verdict.action

    def _unit(self, stems: tuple[Stem, ...], verdict: Verdict) -> Unit:
        modules = dict.fromkeys([one for stem in stems for slot in stem.members for one in slot])
        linears = {module: self._linears[module] for module in modules}
        group = verdict.group
        measured = self._members[group] if group else tuple(linears.values())
        if verdict.form is None:
            raise RuntimeError(f"{stems[0].name} stays")
        return Unit(
            stems,
            linears,
            measured,
            verdict.action,
            verdict.form,
            self._target,
            self._labels.get(group) if group else None,
            self._amaxes.get(next(iter(modules))),
        )

    def _laid_over(self, verdict: Verdict) -> Linear:
        """Return the linear layer as it is rounded, through FP8 with --via."""
        is_rounded = verdict.action == "quantize" and verdict.form and verdict.form.format.is_fp4
        if not (self._target.via and is_rounded):
            return verdict.linear
        from fp4convert.checkpoint.encodings.through_fp8 import through_fp8

        return through_fp8(verdict.linear)


def _label(group: ScaleGroup, members: tuple[Linear, ...]) -> str:
    """Name a group for people: its parent, and the members that are there."""
    leaves = {linear.module.rpartition(".")[2] for linear in members}
    there = tuple(leaf for leaf in group.members if leaf in leaves)
    return str(ScaleGroup(group.parent, there))
