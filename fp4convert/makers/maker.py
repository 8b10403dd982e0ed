"""Define the protocol of makers.

A maker is a frozen value of a plan, for one scale group in a shard, one stack or one tensor. It
lists the tensors that it reads; `parts` yields the bytes and returns facts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from fp4convert.checkpoint.dialects.tables import Part
from fp4convert.errors import NumericError
from fp4convert.numerics.backends.base import Backend
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

PAUSE: Part = ("", memoryview(b""))
"""Stands behind the scalars that a maker yields before it reads its rows a second time."""


class Fact(NamedTuple):
    """One result of a maker for the record of its task.

    kind   account: the losses of a module; global_scale: of a scale group with members in other
           shards, which must find the same; taken_over: the module came with codes; saturated: a
           given global scale is too small for some weights of the module; erased: number of its
           rows that a large global scale turned into zeros; norm: whether a norm that stays holds
           zeros alone
    about  name of the module or the scale group
    """

    kind: Literal["account", "global_scale", "taken_over", "saturated", "erased", "norm"]
    about: str
    value: object = None


class Cast(NamedTuple):
    """A module whose blocks become blocks of another format.

    kept_blocks  number of its blocks with every value as it was
    """

    module: str
    blocks: int
    kept_blocks: int

    @property
    def is_lossy(self) -> bool:
        return self.blocks != self.kept_blocks


Parts = Generator[Part, None, tuple[Fact, ...]]


class Tools(NamedTuple):
    """The tools of all makers; opened once, and part of no key.

    calibration  the open file that methods name by its sha256; None where none takes statistics
    threads      callers that serve it best; 0: as the backend says
    """

    source: Source
    backend: Backend
    calibration: Calibration | None = None
    threads: int = 0


class Maker(Protocol):
    """Writes the bytes of one scale group in a shard, one stack or one tensor.

    The repr of a maker is its part of the key of its task: equal reprs promise equal bytes. A field
    that has no repr (an open artifact, the factors of an adapter) needs a hash beside it. The
    defaults are those of a maker that reads its tensors once, and measures none.
    """

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        """List the tensors whose bytes go into the result, of any shard."""

    @property
    def measures(self) -> tuple[TensorRef, ...]:
        """List the tensors that are read for scales alone, of any shard."""
        return ()

    @property
    def held_nbytes(self) -> int:
        """Count the bytes of the source that are read more than once together."""
        return 0

    @property
    def pauses(self) -> bool:
        """Tell whether `parts` yields PAUSE after the scalars."""
        return False

    @property
    def carries(self) -> bool:
        """Return whether it keeps or casts codes, which are counted after a run."""
        return False

    def casts(self, source: Source) -> Iterable[Cast]:
        """Count the blocks of modules that are cast; reads them again."""
        return ()

    def parts(self, tools: Tools) -> Parts:
        """Yield bytes to append to the output of a name; return the facts.

        Each output comes from its first byte to its last; a part is valid until the next is asked
        for.

        Raises  UnsoundShardError that names tensors; NumericError; DeviceError
        """


class UnsoundShardError(Exception):
    """A shard that cannot be finished because of unsound tensors."""

    def __init__(self, errors: list[NumericError]) -> None:
        super().__init__()
        self.errors = errors
