"""Find the quantized modules of an artifact.

Records and headers say where each is, of which form, and if it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from fp4convert.checkpoint.dialects.base import Dialect, Packed, whole
from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES, Form, Group, parents_of
from fp4convert.checkpoint.dialects.stacks import StridedRows, places_of
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FP8
from fp4convert.recipes.patterns import matches
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec

T = TypeVar("T")
# A form, and the tensors of a matrix of that form and of a given shape, named by their endings.
Stored = tuple[Form, Callable[[tuple[int, ...]], tuple[TensorSpec, ...]]]
STACK_DIMENSIONS = 3
UNSAID = "not every four-bit module has one, or the record says nothing of them"


class _Reader:
    """Gathers the modules of an artifact, and what is wrong with them."""

    def __init__(
        self, tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
    ) -> None:
        self._tensors = tensors
        self._dialect = dialect
        # Then every module has a matrix of its own, and its height tells where its rows are.
        self._is_each_alone = dialect.slots is whole
        self._whole_places: dict[int, tuple[StridedRows, ...]] = {}  # models have few heights
        # A model has few shapes, and many modules of each.
        self._stored = cache(lambda form: (form, cache(partial(dialect.outputs, "", form=form))))
        self._stored_of = form_finder([(self._stored(form), modules) for form, modules in groups])
        beside = [name for name in tensors if name.endswith(dialect.TRAITS.companions)]
        self._companions = [
            ending
            for ending in dialect.TRAITS.companions
            if any(name.endswith(ending) for name in beside)
        ]
        self.modules: dict[str, Packed] = {}
        self.findings: list[Finding] = []

    def read(self, stem: str, has_fp8_weight: bool = False) -> None:
        """Read a stem that its tensors say to be quantized in this dialect.

        has_fp8_weight  that is all they say: an ordinary tensor unless the record says otherwise
        """
        stored = self._stored_of(stem)
        if stored is None:
            if not has_fp8_weight:
                detail = "it has scales, and no group or pattern of the record says what it is"
                self.findings.append(Finding("error", "form-unknown", stem, detail))
            return
        form, _ = stored
        if has_fp8_weight and not form.format.is_fp8:
            detail = f"it is FP8, and the record says {form.word}"
            self.findings.append(Finding("error", "tensor-shape", f"{stem}.weight", detail))
            return
        packed = self._tensors.get(
            stem + (WEIGHT if form.format.is_fp8 else self._dialect.TRAITS.packed)
        )
        if packed is None:
            detail = "its scales are there, its packed codes are not"
            self.findings.append(Finding("error", "packed-missing", stem, detail))
            return
        shape = self._dialect.stored_shape(stem, packed, form)
        if shape is None and self._is_unread_stack(stem, packed):
            return  # no fault; inspect names what nothing here reads
        if shape is None:
            found = f"{packed.dtype} {list(packed.shape)}"
            detail = f"{found} holds no matrix of whole blocks of {form.format.block_size}"
            self.findings.append(Finding("error", "packed-shape", stem, detail))
            return
        if not form.format.block_size:  # with the dtype that its scales have
            table = self._dialect.TRAITS.fp8
            scales = self._tensors.get(stem + (table.scales if table else ".weight_scale"))
            if scales and scales.dtype in SCALE_DTYPES:
                stored = self._stored(replace(form, stored_scales=scales.dtype))
        self._check(stem, shape, stored)

    def _is_unread_stack(self, stem: str, packed: TensorRef) -> bool:
        """Tell whether it is a stack that engines of the dialect read."""
        if len(packed.shape) != STACK_DIMENSIONS or not packed.elements:
            return False
        names = (stem + ending for ending in self._dialect.TRAITS.unread_stacks)
        scales = (self._tensors[name] for name in names if name in self._tensors)
        return any(ref.shape[:-1] == packed.shape[:-1] for ref in scales)

    def _check(self, stem: str, shape: tuple[int, ...], stored: Stored) -> None:
        """Add the module where its tensors are there and of their shapes."""
        traits, tensors, (form, specs_of) = self._dialect.TRAITS, self._tensors, stored
        missing_allowed = traits.implied
        if form.format.is_fp8:
            if reason := self._dialect.unfit(stem, (shape[-2], shape[-1]), form):
                detail = f"{reason}, which this dialect does not hold"
                self.findings.append(Finding("error", "form-unknown", stem, detail))
                return
            # An FP8 module may lack its input scale, though its engines want it.
            table = traits.fp8
            if table and table.input_scale and table.has_input_scale(form):
                missing_allowed = (*missing_allowed, table.input_scale)
                if stem + table.input_scale not in tensors:
                    detail = "it is FP8 with one scale, and has no scale of activations"
                    detail = f"{detail}: engines that quantize them would compute garbage"
                    finding = Finding("warning", "input-scale-missing", stem, detail)
                    self.findings.append(finding)
        is_whole, refs = True, []
        for spec in specs_of(shape):
            ref = tensors.get(stem + spec.name)
            if ref is not None:
                refs.append(ref)
            if ref is None or ref.dtype != spec.dtype or ref.shape != spec.shape:
                free = missing_allowed if ref is None else traits.labels  # these have any length
                named = spec._replace(name=stem + spec.name)
                if not spec.name.endswith(free) and (fault := _fault(ref, named, form)):
                    is_whole = False
                    self.findings.append(fault)
        if not is_whole:
            return
        names = [name for ending in self._companions if (name := stem + ending) in tensors]
        companions = tuple([tensors[name] for name in names])
        if self._is_each_alone:
            height, known = shape[0], self._whole_places
            placed = {
                stem: known.get(height) or known.setdefault(height, (StridedRows(0, 0, 1, height),))
            }
        else:
            placed = places_of(self._dialect.slots(stem, shape))
        for module, places in placed.items():
            rows = places[0].height if len(places) == 1 else sum([each.height for each in places])
            matrix = (rows, shape[-1])
            self.modules[module] = Packed(
                tuple(refs), matrix, companions, stem, shape, places, form
            )


def read_modules(
    tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
) -> tuple[dict[str, Packed], list[Finding]]:
    """Return the sound quantized modules, and findings on the others.

    There is a finding for each tensor that is missing or misshapen.
    """
    reader = _Reader(tensors, groups, dialect)
    stems = dialect.find(tensors)
    for stem in stems:
        reader.read(stem)
    table = dialect.TRAITS.fp8
    if table and any(group.form.format.is_fp8 for group in groups):
        known = set(stems)
        for name, ref in tensors.items():
            is_matrix = ref.dtype == "F8_E4M3" and len(ref.shape) == 2
            if name.endswith(WEIGHT) and is_matrix and name.removesuffix(WEIGHT) not in known:
                reader.read(name.removesuffix(WEIGHT), has_fp8_weight=True)
    return reader.modules, reader.findings


def _fault(found: TensorRef | None, spec: TensorSpec, form: Form) -> Finding | None:
    """Say what is wrong with a tensor; None where nothing is.

    The scales of FP8 may stand in another shape of as many, as producers write them, and that of
    activations as any float.
    """
    expected = f"expected {spec.dtype} {list(spec.shape)}"
    if found is None:
        return Finding("error", "tensor-missing", spec.name, f"{expected}, found nothing")
    sizes, wanted = ([n for n in shape if n > 1] for shape in (found.shape, spec.shape))
    is_fit = found.shape == spec.shape or (sizes == wanted and form.format is FP8)
    is_float = spec.name.endswith(".input_scale") and found.dtype in SCALE_DTYPES
    if is_fit and (found.dtype == spec.dtype or (is_float and form.format is FP8)):
        return None
    detail = f"{expected}, found {found.dtype} {list(found.shape)}"
    return Finding("error", "tensor-shape", spec.name, detail)


def form_finder(groups: Iterable[tuple[T, Sequence[str]]]) -> Callable[[str], T | None]:
    """Make a function from a module's name to its form.

    It gives None where no group names the module; names come before patterns. "X.*" is asked for
    the names above a module: a record may list the experts of a thousand layers.

    groups  of forms, or of what else is said of modules, and their names and patterns
    """
    names: dict[str, T] = {}
    above: dict[str, T] = {}
    patterns: list[tuple[str, T]] = []
    for form, modules in groups:
        for module in modules:
            stem = module.removesuffix(".*")
            if module.startswith("re:") or set(stem) & set("*?["):
                patterns.append((module, form))
            else:
                (names if stem == module else above).setdefault(stem, form)

    def find(module: str) -> T | None:
        found = names.get(module)
        if found is None and above:
            found = next((above[parent] for parent in parents_of(module) if parent in above), None)
        if found is None:
            for pattern, form in patterns:
                if pattern == "*" or matches(pattern, module):
                    return form
        return found

    return find


def idle_scales(
    modules: Mapping[str, Packed], cache_scales: Collection[str], has_inputs: bool
) -> list[str]:
    """List scales of four-bit modules that mean nothing for the artifact.

    Only some modules have such input scales.

    has_inputs  all of them have
    """
    names = (
        ref.name
        for packed in modules.values()
        for ref in packed.companions
        if ref not in packed.refs or (packed.form.has_input_scale and not has_inputs)
    )
    return [name for name in names if name not in cache_scales]
