"""Describe the result of a calibration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

NAMED_MODULES = 3  # in a warning that many could stand in


@dataclass(frozen=True, slots=True, repr=False)
class Calibrated:
    """The result of a calibration.

    output_bytes   of the file, and of the parts of an index
    samples_asked  number of samples asked for
    linears        modules with statistics
    unrouted       modules of experts with statistics of tokens that were not routed to them
    unwatched      modules without statistics
    opaque         of these, experts that calibrate cannot see into
    """

    output: Path
    output_bytes: int
    samples_asked: int
    samples: int
    tokens: int
    linears: int
    experts: int
    unrouted: tuple[str, ...]
    unwatched: tuple[str, ...]
    opaque: tuple[str, ...]
    sha256: str
    seconds: float

    def __repr__(self) -> str:
        """Return a line for the end of a notebook's cell."""
        seen = f"{self.linears} linear layers, {self.samples} samples, {self.tokens:,} tokens"
        return f"<Calibrated {self.output}: {seen}>"

    @property
    def warnings(self) -> list[str]:
        """List what a person should know."""
        known = set(self.opaque)
        passed_by = tuple(module for module in self.unwatched if module not in known)
        found = []
        if 2 * self.samples < self.samples_asked:
            found.append(
                f"the text has {self.samples} of {self.samples_asked} samples,"
                f" {self.tokens:,} tokens: statistics of so little may not be those of other"
                " text; give more text"
            )
        for modules, what in (
            (
                self.unrouted,
                "of experts that received too few tokens; their statistics are of all tokens of"
                " the layer; more text helps",
            ),
            (
                self.opaque,
                "experts without statistics and saliency: transformers computes them in a"
                " way that calibrate cannot observe; prune does not take this file",
            ),
            (passed_by, "without statistics, since no text goes through them"),
        ):
            if modules:
                more = ", ..." if len(modules) > NAMED_MODULES else ""
                names = f"{', '.join(modules[:NAMED_MODULES])}{more}"
                found.append(f"{len(modules)} linear layers ({names}): {what}")
        return found

    def as_json(self) -> dict[str, object]:
        lists = {name: list(getattr(self, name)) for name in ("unrouted", "unwatched", "opaque")}
        output = str(self.output)
        return {**asdict(self), "output": output, **lists, "warnings": self.warnings}
