"""Spell panels in a dialect; add up losses; name unsound weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from fp4convert.calibration.methods.scaled_weights import reach_of
from fp4convert.checkpoint.dialects.base import Dialect, MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.tables import Part
from fp4convert.checkpoint.encodings.base import Linear, find_not_finite
from fp4convert.errors import DeviceError, NumericError
from fp4convert.makers.maker import Fact, Tools, UnsoundShardError
from fp4convert.makers.unit import Stem
from fp4convert.numerics.error_sums import Account, Sums, count_erased_rows
from fp4convert.numerics.matrices import Compared, Quantized
from fp4convert.storage.source import Source

NO_BYTES = memoryview(b"")


class Spelling(NamedTuple):
    """A dialect by its name, and the form of modules in it."""

    dialect: str
    form: Form

    @property
    def spoken(self) -> Dialect:
        return dialect_named(self.dialect)

    def encode(self, stem: Stem, panels: Iterator[Quantized], reach: float = 1.0) -> Iterator[Part]:
        """Yield the scalars of a stem, then its panels, under their names.

        reach  factor by which a fold makes inputs larger
        """
        scales = tuple([None if one is None else one * reach for one in stem.input_scales])
        is_alone = len(scales) < 2
        first = next(iter(scales), None)
        encoder = MatrixEncoder(self.spoken, self.form, first, () if is_alone else scales)
        return encoder.encode(stem.name, stem.shape, panels)

    def scalars(self, stem: Stem, global_scale: float, reach: float = 1.0) -> list[Part]:
        """Return the named scalars of a matrix with a known global scale."""
        rows, columns = stem.shape
        q = Quantized(self.form.format, (rows, columns), NO_BYTES, NO_BYTES, global_scale)
        scale = None
        if self.form.has_input_scale and stem.input_scales and stem.input_scales[0] is not None:
            scale = stem.input_scales[0] * reach
        return list(self.spoken.TRAITS.scalars.encode(stem.name, q, scale))


class Losses:
    """Adds up the losses of one stem, as its panels pass."""

    def __init__(self, stem: str, linears: Sequence[Linear], form: Form) -> None:
        self._stem, first = stem, linears[0]
        name = first.name if len(linears) == 1 else first.refs[0].name
        account = Account(name, form.format.name, first.coding.against, Sums())
        self._account = replace(account, source_dtype=first.refs[0].dtype)
        self._is_known = False
        self._erased_rows = 0
        self.global_scale: float | None = None

    def passing(self, panels: Iterable[Quantized]) -> Iterator[Quantized]:
        for q in panels:
            self.global_scale = q.global_scale
            if q.format.has_global_scale:
                self._erased_rows += count_erased_rows(q)
            if q.compared:
                self.add(q.compared, q.shape[0] * q.shape[1])
            yield q

    def add(self, compared: Compared, elements: int) -> None:
        self._account = self._account.plus(compared, elements)
        self._is_known = True

    def facts(self) -> tuple[Fact, ...]:
        account = Fact("account", self._stem, self._account)
        erased = Fact("erased", self._stem, self._erased_rows)
        return (account,) * self._is_known + (erased,) * (self._erased_rows > 0)


def reach_over(linears: Sequence[Linear], source: Source) -> float:
    """Return the factor by which folds enlarge inputs of a scale group."""
    return max(reach_of(linear, source) for linear in linears)


@contextmanager
def naming(linears: Sequence[Linear], tools: Tools) -> Iterator[None]:
    """Turn a NumericError into one for each layer with NaN or Inf.

    Raises  UnsoundShardError; DeviceError where a device reports NaN in finite weights
    """
    try:
        yield
    except NumericError as error:
        if error.code != "not-finite":
            raise UnsoundShardError([error]) from None
        unsound = [one for linear in linears if (one := find_not_finite(tools.source, linear))]
        if unsound:
            raise UnsoundShardError(unsound) from None
        detail = f"{tools.backend.name} found NaN or Inf in {linears[0].name}, which has none"
        next_step = "Run the same command again, or with --device cpu."
        raise DeviceError("device-failed", detail, next_step) from None
