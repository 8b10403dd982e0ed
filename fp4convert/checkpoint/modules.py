"""Find the quantized modules of an artifact.

Records and headers say where each is, of which form, and if it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from fp4convert.checkpoint.dialects.base import Dialect, Packed, whole
from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES, Form, Group
from fp4convert.checkpoint.dialects.stacks import Piece, pieces_of
from fp4convert.checkpoint.dialects.tables import parents_of
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FP8
from fp4convert.recipes.patterns import matches
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec

T = TypeVar("T")
UNSAID = "not every four-bit module has one, or the record says nothing of them"


class _Kind:
    """How modules of one form are stored.

    packed  ending of the tensor of codes
    specs   the tensors of a matrix of that shape, named by their endings
    """

    def __init__(self, form: Form, dialect: Dialect) -> None:
        self.form = form
        self.is_fp4, self.is_fp8 = form.format.is_fp4, form.format is FP8
        self.packed = WEIGHT if self.is_fp8 else dialect.TRAITS.packed
        self.specs = cache(
            partial(dialect.outputs, "", form=form)
        )  # a model has few shapes, and many modules of each


class _Reader:
    """Gathers the modules of an artifact, and what is wrong with them."""

    def __init__(
        self, tensors: Mapping[str, TensorRef], groups: Sequence[Group], dialect: Dialect
    ) -> None:
        self._tensors = tensors
        self._dialect = dialect
        self._has_own_matrix = (
            dialect.slots is whole
        )  # every module, then: `_alone` knows its rows by their number
        self._kind = cache(lambda form: _Kind(form, dialect))
        self._kind_of = form_finder([(self._kind(form), modules) for form, modules in groups])
        beside = [name for name in tensors if name.endswith(dialect.TRAITS.companions)]
        self._companions = [
            ending
            for ending in dialect.TRAITS.companions
            if any(name.endswith(ending) for name in beside)
        ]
        self.has_fp8 = any(group.form.format is FP8 for group in groups)
        self.modules: dict[str, Packed] = {}
        self.findings: list[Finding] = []

    def read(self, stem: str) -> None:
        """A stem that its tensors say to be quantized in this dialect."""
        kind = self._kind_of(stem)
        if kind is None:
            detail = "it has scales, and no group or pattern of the record says what it is"
            self.findings.append(Finding("error", "form-unknown", stem, detail))
            return
        packed = self._tensors.get(stem + kind.packed)
        if packed is None:
            self.findings.append(
                Finding(
                    "error",
                    "packed-missing",
                    stem,
                    "its scales are there, its packed codes are not",
                )
            )
            return
        shape = self._dialect.stored_shape(stem, packed, kind.form)
        if shape is None:
            detail = f"{packed.dtype} {list(packed.shape)} holds no matrix of whole blocks of {kind.form.format.block_size}"
            self.findings.append(Finding("error", "packed-shape", stem, detail))
            return
        self._check(stem, shape, kind if kind.is_fp4 else self._as_stored(stem, kind))

    def read_beside(self, stem: str) -> None:
        """A stem whose weight is FP8, which is an ordinary tensor unless the record says otherwise."""
        kind = self._kind_of(stem)
        if kind is None:
            return
        if kind.is_fp8:
            self.read(stem)
        elif self.has_fp8:
            detail = f"it is FP8, and the record says {kind.form.word}"
            self.findings.append(Finding("error", "tensor-shape", f"{stem}.weight", detail))

    def _as_stored(self, stem: str, kind: _Kind) -> _Kind:
        """The kind with the dtype that its scales have."""
        scales = self._tensors.get(f"{stem}.weight_scale")
        return (
            self._kind(replace(kind.form, stored_scales=scales.dtype))
            if scales and scales.dtype in SCALE_DTYPES
            else kind
        )

    def _check(self, stem: str, shape: tuple[int, ...], kind: _Kind) -> None:
        """Take the module in where its tensors are there and of their shapes."""
        traits, tensors, form = self._dialect.TRAITS, self._tensors, kind.form
        reason = self._dialect.unfit(stem, (shape[-2], shape[-1]), form) if kind.is_fp8 else None
        if reason:
            self.findings.append(
                Finding(
                    "error", "form-unknown", stem, f"{reason}, which this dialect does not hold"
                )
            )
            return
        wanted = self._wanted(stem, form) if kind.is_fp8 else ()
        is_whole, refs = True, []
        for spec in kind.specs(shape):
            ref = tensors.get(stem + spec.name)
            if ref is not None:
                refs.append(ref)
            if ref is None or ref.dtype != spec.dtype or ref.shape != spec.shape:
                free = (
                    (*traits.implied, *wanted) if ref is None else traits.labels
                )  # may be missing; of any length
                if not spec.name.endswith(free) and (
                    fault := _fault(ref, spec._replace(name=stem + spec.name), form)
                ):
                    is_whole = False
                    self.findings.append(fault)
        if is_whole:
            companions = tuple(
                [tensors[name] for ending in self._companions if (name := stem + ending) in tensors]
            )
            placed = (
                {stem: _alone(shape[0])}
                if self._has_own_matrix
                else pieces_of(self._dialect.slots(stem, shape))
            )
            for module, pieces in placed.items():
                rows = (
                    pieces[0].height
                    if len(pieces) == 1
                    else sum([piece.height for piece in pieces])
                )
                self.modules[module] = Packed(
                    tuple(refs), (rows, shape[-1]), companions, stem, shape, pieces, form
                )

    def _wanted(self, stem: str, form: Form) -> tuple[str, ...]:
        """Endings of what an FP8 module may lack, though its engines want it."""
        table = self._dialect.TRAITS.fp8
        if (
            table is None
            or table.input_scale is None
            or form.format is not FP8
            or form.granularity != "tensor"
        ):
            return ()
        if stem + table.input_scale not in self._tensors:
            detail = "it is FP8 with one scale, and has no scale of activations: engines that quantize them would compute garbage"
            self.findings.append(Finding("warning", "input-scale-missing", stem, detail))
        return (table.input_scale,)


@cache
def _alone(rows: int) -> tuple[Piece, ...]:
    """What `pieces_of` says of a module that is stored by itself; models have few heights."""
    return pieces_of(whole("", (rows,)))[""]


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
        return Finding(
            "error",
            "tensor-missing",
            spec.name,
            f"expected {spec.dtype} {list(spec.shape)}, found nothing",
        )
    is_alike = [size for size in found.shape if size > 1] == [
        size for size in spec.shape if size > 1
    ]
    if found.dtype != spec.dtype or not (
        found.shape == spec.shape or (is_alike and form.format is FP8)
    ):
        detail = (
            f"expected {spec.dtype} {list(spec.shape)}, found {found.dtype} {list(found.shape)}"
        )
        return Finding("error", "tensor-shape", spec.name, detail)
    return None


def form_finder(groups: Iterable[tuple[T, Sequence[str]]]) -> Callable[[str], T | None]:
    """A function from a module's name to its form, or None where no group names it; names come before patterns.

    "X.*" is asked for the names above a module: a record may list the experts of a thousand layers.

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
