"""Find the quantized modules of an artifact by its records and headers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from fp4convert.checkpoint.dialects.base import Dialect, Packed, whole
from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES, Form, Group, parents_of
from fp4convert.checkpoint.dialects.stacks import Rows, Slot, StridedRows, places_of
from fp4convert.checkpoint.record import TABLE, TABLE_SCALES
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FP8
from fp4convert.recipes.patterns import matches
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec

T = TypeVar("T")
# A form, and the tensors of a matrix of that form by its shape, named by their endings.
FormSpecs = tuple[Form, Callable[[tuple[int, ...]], tuple[TensorSpec, ...]]]
UNSAID = "not every four-bit module has one, or the record says nothing of them"


class _Reader:
    """Gathers the modules of an artifact, and findings on them."""

    def __init__(
        self, tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
    ) -> None:
        self._tensors = tensors
        self._dialect = dialect
        # A matrix of each module's own has its places by its height.
        self._is_each_alone = dialect.slots is whole
        self._whole_places = cache(lambda height: (StridedRows(0, 0, 1, height),))
        # A model has few shapes, and many modules of each.
        self._specs = cache(lambda form: (form, cache(partial(dialect.outputs, "", form=form))))
        self._specs_of = form_finder([(self._specs(form), modules) for form, modules in groups])
        beside = [name for name in tensors if name.endswith(dialect.TRAITS.companions)]
        self._companions = [
            ending
            for ending in dialect.TRAITS.companions
            if any(name.endswith(ending) for name in beside)
        ]
        self.modules: dict[str, Packed] = {}
        self.findings: list[Finding] = []

    def read(self, stem: str, has_fp8_weight: bool = False) -> None:
        """Read a stem whose tensors show that it is quantized in this dialect.

        has_fp8_weight  its dtype alone shows it: an ordinary tensor unless a record names it
        """
        traits, specs = self._dialect.TRAITS, self._specs_of(stem)
        if TABLE.fullmatch(stem):  # a shard, the scale of all, or a whole table beside blocks
            has_scale = any(stem + ending in self._tensors for ending in TABLE_SCALES)
            is_of_blocks = specs is not None and isinstance(specs[0].granularity, tuple)
            if is_of_blocks or (stem + WEIGHT in self._tensors) != has_scale:
                return
        if specs is None:
            if not has_fp8_weight:
                detail = "it has scales, and no group or pattern of the record says what it is"
                self.findings.append(Finding("error", "form-unknown", stem, detail))
            return
        form, _ = specs
        if has_fp8_weight and not form.format.is_fp8:
            detail = f"it is FP8, and the record says {form.word}"
            self.findings.append(Finding("error", "tensor-shape", stem + WEIGHT, detail))
            return
        packed = self._tensors.get(stem + (WEIGHT if form.format.is_fp8 else traits.packed))
        packed = packed or self._tensors.get(stem)  # a stack, a parameter of its own name
        if packed is None:
            detail = "its scales are there, its packed codes are not"
            self.findings.append(Finding("error", "packed-missing", stem, detail))
            return
        shape = self._dialect.stored_shape(stem, packed, form)
        if shape is None:
            detail = f"{packed.dtype} {list(packed.shape)} holds no matrix of whole blocks of"
            detail += f" {form.format.block_size}"
            self.findings.append(Finding("error", "packed-shape", stem, detail))
            return
        if not form.format.block_size:  # with the dtype that its scales have
            ending = traits.fp8.scales if traits.fp8 else ".weight_scale"
            scales = self._find(stem, ending)
            if scales and scales.dtype in SCALE_DTYPES:
                specs = self._specs(replace(form, stored_scales=scales.dtype))
        self._check(stem, shape, specs)

    def _find(self, stem: str, ending: str) -> TensorRef | None:
        """Return a module's tensor, perhaps under an older name."""
        ref, table = self._tensors.get(stem + ending), self._dialect.TRAITS.fp8
        if ref is None and table and ending in table.older:
            return self._tensors.get(stem + table.older[ending])
        return ref

    def _check(self, stem: str, shape: tuple[int, ...], specs: FormSpecs) -> None:
        """Add the module if its tensors are there and of their shapes."""
        traits, tensors, (form, specs_of) = self._dialect.TRAITS, self._tensors, specs
        missing_allowed = traits.implied
        if form.format.is_fp8:
            table = traits.fp8  # which may hold more than engines of the dialect read
            matrix = (shape[-2], shape[-1])
            unfit = table.unfit(matrix, form) if table else self._dialect.unfit(stem, matrix, form)
            if reason := unfit:
                detail = f"{reason}, which this dialect does not hold"
                self.findings.append(Finding("error", "form-unknown", stem, detail))
                return
            # An FP8 module may lack its input scale, though its engines want it.
            if table and table.input_scale:
                missing_allowed = (*missing_allowed, table.input_scale)
        is_whole, refs = True, []
        for spec in specs_of(shape):
            ref = self._find(stem, spec.name)
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
        placed: dict[str, tuple[StridedRows, ...]]
        if self._is_each_alone:
            placed = {stem: self._whole_places(shape[0])}
        else:
            slots = self._dialect.slots(stem, shape)
            if traits.takes_turns and stem + traits.takes_turns in tensors:
                slots = _in_turns(slots)
            placed = places_of(slots)
        for module, places in placed.items():
            rows = places[0].height if len(places) == 1 else sum([each.height for each in places])
            matrix = (rows, shape[-1])
            self.modules[module] = Packed(
                tuple(refs), matrix, companions, stem, shape, places, form
            )


def _in_turns(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Let rows of neighbours below one parent take turns: gate and up."""
    parents: dict[str, list[Rows]] = {}
    for (rows,) in slots:
        parents.setdefault(rows.module.rpartition(".")[0], []).append(rows)
    return tuple(map(tuple, parents.values()))


def read_modules(
    tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
) -> tuple[dict[str, Packed], list[Finding]]:
    """Return the sound quantized modules, and findings on tensors of others."""
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
    """Return the fault of a tensor, if any.

    Producers write the scales of FP8 in several shapes, and that of activations as any float.
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
    """Make a function from a module's name to its form, or None.

    Names come before patterns. "X.*" is looked up by the names above a module, since a record may
    list the experts of a thousand layers.

    groups  forms, or other facts of modules, and their names and patterns
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
    """List scales of four-bit modules that engines do not use.

    has_inputs  all modules have input scales, which engines then use
    """
    names = (
        ref.name
        for packed in modules.values()
        for ref in packed.companions
        if ref not in packed.refs or (packed.form.has_input_scale and not has_inputs)
    )
    return [name for name in names if name not in cache_scales]
