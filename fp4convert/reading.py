"""Which modules of an artifact are quantized, by its records and headers: where each is, of which form, and if it is whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fp4convert.dialects import Dialect, Packed
from fp4convert.formats import FP8
from fp4convert.patterns import matches
from fp4convert.shard import WEIGHT, TensorRef, TensorSpec
from fp4convert.spelling import SCALE_DTYPES, Form, Group, parents_of
from fp4convert.stacks import pieces_of

Level = Literal["error", "warning", "note"]
UNSAID = "not every four-bit module has one, or the record says nothing of them"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong (error), doubtful (warning) or worth knowing (note)."""

    level: Level
    code: str
    tensor: str | None
    detail: str


class _Reader:
    """Gathers the modules of an artifact, and what is wrong with them."""

    def __init__(self, tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect) -> None:
        self._tensors = tensors
        self._dialect = dialect
        self._form_of = form_finder(groups)
        self.has_fp8 = any(group.form.format is FP8 for group in groups)
        self.modules: dict[str, Packed] = {}
        self.findings: list[Finding] = []

    def read(self, stem: str) -> None:
        """A stem that its tensors say to be quantized in this dialect."""
        form = self._form_of(stem)
        if form is None:
            detail = "it has scales, and no group or pattern of the record says what it is"
            self.findings.append(Finding("error", "form-unknown", stem, detail))
            return
        ending = WEIGHT if form.format is FP8 else self._dialect.TRAITS.packed
        packed = self._tensors.get(stem + ending)
        if packed is None:
            self.findings.append(Finding("error", "packed-missing", stem, "its scales are there, its packed codes are not"))
            return
        shape = self._dialect.stored_shape(stem, packed, form)
        if shape is None:
            detail = f"{packed.dtype} {list(packed.shape)} holds no matrix of whole blocks of {form.format.block_size}"
            self.findings.append(Finding("error", "packed-shape", stem, detail))
            return
        if not form.format.is_fp4:
            form = self._as_stored(stem, form)
        self._check(stem, shape, form)

    def read_beside(self, stem: str) -> None:
        """A stem whose weight is FP8, which is an ordinary tensor unless the record says otherwise."""
        form = self._form_of(stem)
        if form is None:
            return
        if form.format is FP8:
            self.read(stem)
        elif self.has_fp8:
            detail = f"it is FP8, and the record says {form.word}"
            self.findings.append(Finding("error", "tensor-shape", f"{stem}.weight", detail))

    def _as_stored(self, stem: str, form: Form) -> Form:
        """The form with the dtype that its scales have."""
        scales = self._tensors.get(f"{stem}.weight_scale")
        return replace(form, stored_scales=scales.dtype) if scales and scales.dtype in SCALE_DTYPES else form

    def _check(self, stem: str, shape: tuple[int, ...], form: Form) -> None:
        """Take the module in where its tensors are there and of their shapes."""
        traits, tensors = self._dialect.TRAITS, self._tensors
        reason = self._dialect.unfit(stem, (shape[-2], shape[-1]), form) if form.format is FP8 else None
        if reason:
            self.findings.append(Finding("error", "form-unknown", stem, f"{reason}, which this dialect does not hold"))
            return
        specs = self._dialect.outputs(stem, shape, form)
        free = {True: traits.labels, False: (*traits.implied, *self._wanted(stem, form))}  # of any length; may be missing
        exact = [spec for spec in specs if not spec.name.endswith(free[spec.name in tensors])]
        faults = [fault for spec in exact if (fault := _fault(tensors.get(spec.name), spec, form))]
        self.findings += faults
        if not faults:
            names = [stem + ending for ending in traits.companions]
            refs = tuple(tensors[spec.name] for spec in specs if spec.name in tensors)
            companions = tuple(tensors[name] for name in names if name in tensors)
            for module, pieces in pieces_of(self._dialect.slots(stem, shape)).items():
                rows = sum(piece.height for piece in pieces)
                self.modules[module] = Packed(refs, (rows, shape[-1]), companions, stem, shape, pieces, form)

    def _wanted(self, stem: str, form: Form) -> tuple[str, ...]:
        """Endings of what an FP8 module may lack, though its engines want it."""
        table = self._dialect.TRAITS.fp8
        if table is None or table.input_scale is None or form.format is not FP8 or form.granularity != "tensor":
            return ()
        if stem + table.input_scale not in self._tensors:
            detail = "it is FP8 with one scale, and has no scale of activations: engines that quantize them would compute garbage"
            self.findings.append(Finding("warning", "input-scale-missing", stem, detail))
        return (table.input_scale,)


def read_modules(
    tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
) -> tuple[dict[str, Packed], list[Finding]]:
    """The sound quantized modules with their shapes, and a finding for each tensor that is missing or misshapen."""
    reader = _Reader(tensors, groups, dialect)
    for stem in dialect.find(tensors):
        reader.read(stem)
    if reader.has_fp8:
        for stem in _fp8_stems(tensors):
            reader.read_beside(stem)
    return reader.modules, reader.findings


def _fp8_stems(tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    for name, ref in tensors.items():
        if name.endswith(WEIGHT) and ref.dtype == "F8_E4M3" and len(ref.shape) == 2:
            yield name.removesuffix(WEIGHT)


def _fault(found: TensorRef | None, spec: TensorSpec, form: Form) -> Finding | None:
    """What is wrong with a tensor; the scales of FP8 may stand in another shape of as many, as producers write them."""
    if found is None:
        return Finding("error", "tensor-missing", spec.name, f"expected {spec.dtype} {list(spec.shape)}, found nothing")
    is_alike = [size for size in found.shape if size > 1] == [size for size in spec.shape if size > 1]
    if found.dtype != spec.dtype or not (found.shape == spec.shape or (is_alike and form.format is FP8)):
        detail = f"expected {spec.dtype} {list(spec.shape)}, found {found.dtype} {list(found.shape)}"
        return Finding("error", "tensor-shape", spec.name, detail)
    return None


def form_finder(groups: Sequence[Group]) -> Callable[[str], Form | None]:
    """A function from a module's name to its form, or None where no group names it; names come before patterns.

    "X.*" is asked for the names above a module: a record may list the experts of a thousand layers.
    """
    names: dict[str, Form] = {}
    above: dict[str, Form] = {}
    patterns: list[tuple[str, Form]] = []
    for form, modules in groups:
        for module in modules:
            stem = module.removesuffix(".*")
            if module.startswith("re:") or set(stem) & set("*?["):
                patterns.append((module, form))
            else:
                (names if stem == module else above).setdefault(stem, form)

    def find(module: str) -> Form | None:
        found = names.get(module) or next((above[parent] for parent in parents_of(module) if parent in above), None)
        return found or next((form for pattern, form in patterns if matches(pattern, module)), None)

    return find


def idle_scales(modules: Mapping[str, Packed], cache_scales: Collection[str], has_inputs: bool) -> list[str]:
    """Scales beside four-bit modules that mean nothing for the artifact as a whole: only some modules have input scales.

    has_inputs  all of them have
    """
    names = (
        ref.name
        for packed in modules.values()
        for ref in packed.companions
        if ref not in packed.refs or (packed.form.has_input_scale and not has_inputs)
    )
    return [name for name in names if name not in cache_scales]
