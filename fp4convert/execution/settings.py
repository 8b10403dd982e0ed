"""How a process works, and its result: Settings and Result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from fp4convert.errors import NumericError
from fp4convert.execution.share import Share
from fp4convert.process import processors
from fp4convert.progress import Phases, size_text
from fp4convert.storage.system import most_files

AGAIN = (
    "Download the file again, in case it is damaged; or keep these weights as they are, by the same"
    " command with "
)
FILES_A_SHARD = 8  # that may be open: what is read, written and hashed, with some to spare
OnNamed = Callable[[Path, str, str], object]


class Elsewhere(NamedTuple):
    """The place that finished shards are sent to, instead of staying.

    name       of the repository, if it is one
    send       called with path, name and sha256 of a shard; several threads may call it. Returns
               a future to wait for before the file is removed, or None
    find_lost  takes size and sha256 of files that were sent, by name, and returns those that are
               gone
    """

    name: str
    send: Callable[[Path, str, str], Future[None] | None]
    find_lost: Callable[[Mapping[str, tuple[int, str]]], set[str]] = lambda files: set()

    def below(self, folder: str) -> Elsewhere:
        """Return the same for the files of a folder in it."""

        def find_lost(files: Mapping[str, tuple[int, str]]) -> set[str]:
            lost = self.find_lost({f"{folder}/{file}": known for file, known in files.items()})
            return {file for file in files if f"{folder}/{file}" in lost}

        return Elsewhere(
            self.name,
            lambda path, file, sha256: self.send(path, f"{folder}/{file}", sha256),
            find_lost,
        )


def summarize(errors: Sequence[NumericError]) -> NumericError:
    """Join errors into one, with the options that complete the run."""
    steps = dict.fromkeys(error.next_step.removeprefix(AGAIN) for error in errors)
    others = [step for step in steps if not step.startswith("--exclude ")]
    next_step = others[0] if others else AGAIN + " ".join(steps)
    lines = tuple(line for error in errors for line in error.lines)
    return NumericError(errors[0].code, lines, next_step, errors[0].tensor)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the work; none changes a byte of the result.

    workers     threads; 0: as many as the device serves best
    phases      gets the progress
    is_forced   files of another, finished plan in the output folder may go
    is_joining  one of several processes that begin together: none of them may replace a plan
    share       the part of the tasks that this process does; None: all that no other does
    tell        gets a line for people when everything has to wait
    next        commands to run after the end; `merge` prints them
    elsewhere   where shards go; None where they stay
    at_once     shards that may be begun at once, where fewer than usual
    on_named    called with path, name and sha256 of every file that this process gave its final
                name; several threads may call it
    """

    device: str = "auto"
    workers: int = 0
    is_forced: bool = False
    phases: Phases = field(default_factory=Phases)
    is_joining: bool = False
    share: Share | None = None
    tell: Callable[[str], None] = lambda line: None
    next: tuple[str, ...] = ()
    elsewhere: Elsewhere | None = None
    at_once: int | None = None
    on_named: OnNamed = lambda path, file, sha256: None

    @property
    def shards_at_once(self) -> int:
        """Count the shards that may be filled, hashed and flushed at once."""
        files = most_files() // FILES_A_SHARD or 1
        most = min(2 * processors(), files) if most_files() else 2 * processors()
        return most if self.at_once is None else min(most, self.at_once)


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of a conversion; the keys of --json.

    bits_per_weight  of the quantized modules, with scales; None where there are none
    output_bytes     of the whole; after one of several parts, of the files of this process
    digest           of the whole; None after one of several parts
    adopted_bytes    of the source, whose result an earlier run or another process wrote
    share            the part and its number of shards; None for the whole
    pushed           address of the commit on the Hub; None where the result is here alone
    hub_bytes        bytes that have left this disk for the Hub; None where all is here
    components       of a pipeline: name and result of each conversion
    method           of rounding; None where no weight was rounded
    fidelity         summary of the report; None where nothing was rounded, or after a part
    adapter          the merged adapter as in the record, and the number of modules it changed
    saturated        number of modules with weights beyond their given global scales
    erased_rows      number of rows of weights that large global scales turned into zeros
    experts          of a pruned model: experts of a layer before and after, and number of layers
    warnings         warnings for people; None for a component of a pipeline
    next             commands to run now
    engine           the engine of --for, and the versions that load the result
    gpu              the card of --gpu, and the kernels that engines run there
    unexplained      tensors that the model's class does not have, and reasons; None for a part
    """

    output: str
    format: str
    dialect: str | None
    scale_rule: str | None
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str | None
    adopted_bytes: int = 0
    bits_per_weight: float | None = None
    carried: dict[str, object] | None = None
    share: dict[str, int] | None = None
    pushed: str | None = None
    hub_bytes: int | None = None
    components: list[dict[str, object]] | None = None
    method: str | None = None
    fidelity: dict[str, object] | None = None
    adapter: dict[str, object] | None = None
    saturated: int | None = None
    erased_rows: int | None = None
    experts: dict[str, int] | None = None
    warnings: list[str] | None = None
    next: list[str] | None = None
    engine: dict[str, object] | None = None
    gpu: dict[str, object] | None = None
    unexplained: list[dict[str, str]] | None = None

    def __repr__(self) -> str:
        """Summarize the result in a line, for the end of a notebook's cell."""
        (how, count), *_ = self.tensors.items()
        sizes = f"{size_text(self.source_bytes)} -> {size_text(self.output_bytes)}"
        mean = (self.fidelity or {}).get("sqnr_db_mean")
        parts = [self.format, f"{count} tensors {how}", sizes]
        parts += [f"SQNR {mean:.2f} dB on average"] if isinstance(mean, float) else []
        parts += [f"digest {self.digest[:12]}..."] if self.digest else []
        return f"<Result {self.output}: {', '.join(parts)}>"

    def as_json(self) -> dict[str, object]:
        """Return the document; keys that default to None stand only with a value."""
        rare = {each.name for each in fields(self) if each.default is None} - {"bits_per_weight"}
        items = asdict(self).items()
        return {key: value for key, value in items if key not in rare or value is not None}
