"""Has a ratio become worse?  What is measured now against what is committed, row by row.

Decides what a loss is; what is measured again before it counts is bench.py's to decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.sections import Section, printed

TOLERANCE = 0.25  # of the committed ratio
SECONDS = "CPU-seconds"  # heads what is judged by itself: no ratio of two things measured in turn

Key = tuple[str, ...]  # a section's title, then a row's labels


class Ratio(NamedTuple):
    value: float
    is_floor: bool  # whether more is better


class Compared(NamedTuple):
    key: Key
    committed: float
    measured: float
    loss: float  # share of the committed ratio that is lost; negative where it is won

    @property
    def is_lost(self) -> bool:
        return self.loss > TOLERANCE

    def __str__(self) -> str:
        return (
            f"{' / '.join(self.key)}: {printed(self.committed)} committed, "
            f"{printed(self.measured)} now ({-self.loss:+.0%})"
        )


def ratios(sections: Iterable[Section]) -> dict[Key, Ratio]:
    """Every ratio by the name of its row; ValueError where two rows have one name."""
    found: dict[Key, Ratio] = {}
    for section in sections:
        if section.ratio_heading == SECONDS:
            continue
        for row in section.rows:
            key = (section.title, *row.labels)
            if row.ratio is not None and key in found:
                raise ValueError(
                    f"two rows are named {' / '.join(key)}; labels must tell rows apart"
                )
            if row.ratio is not None:
                found[key] = Ratio(row.ratio, section.is_floor)
    return found


def compare(committed: Iterable[Section], measured: Iterable[Section]) -> list[Compared]:
    """The rows that both have; a ratio that is better lower loses by what it grows."""
    before, after = ratios(committed), ratios(measured)
    return [
        Compared(key, old, new, (old - new if is_floor else new - old) / old)
        for key, (new, is_floor) in after.items()
        if key in before and (old := before[key].value)
    ]
