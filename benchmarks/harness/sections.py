"""What a measurement says: rows of figures, each with at most one ratio and its bar.  Page and gate
are made of the same rows.

A ratio is of two things measured in turn in the same run; absolute figures stand beside it, and
nothing is judged by them
unless a section says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.measure import table, verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    labels: tuple[
        str, ...
    ]  # what was measured; with the section's title it names the row in every run
    cells: tuple[str, ...]  # figures as printed
    ratio: float | None = None
    bar: float | None = None
    judged_decimals: int | None = (
        None  # that the ratio is rounded to before it is judged; None: not at all
    )

    def judged(self, is_floor: bool) -> str:
        if self.ratio is None or self.bar is None:
            return ""
        return verdict(
            self.ratio if self.judged_decimals is None else round(self.ratio, self.judged_decimals),
            self.bar,
            is_floor,
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A table, or what is said where there is none."""

    title: str  # the same in every run
    about: str
    headings: tuple[str, ...] = ()  # of labels, then cells
    rows: tuple[Row, ...] = ()
    ratio_heading: str = ""  # empty: no row has a ratio
    is_floor: bool = True  # whether a higher ratio is the better one

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.about]
        if self.rows:
            ends = (self.ratio_heading, "bar") if self.ratio_heading else ()
            parts.append(table([*self.headings, *ends], [self._line(row) for row in self.rows]))
        return "\n\n".join(part for part in parts if part)

    def _line(self, row: Row) -> list[str]:
        ends = [printed(row.ratio), row.judged(self.is_floor)] if self.ratio_heading else []
        return [*row.labels, *row.cells, *ends]

    def verdicts(self) -> list[str]:
        """Of the rows that have a bar."""
        return [text for row in self.rows if (text := row.judged(self.is_floor))]


def printed(ratio: float | None) -> str:
    """Three digits or more."""
    if ratio is None:
        return ""
    size = abs(ratio)
    digits = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{ratio:.{digits}f}"


def as_document(section: Section) -> dict[str, object]:
    """For JSON."""
    rows = [
        [row.labels, row.cells, row.ratio, row.bar, row.judged_decimals] for row in section.rows
    ]
    return {
        **{
            "title": section.title,
            "about": section.about,
            "headings": section.headings,
            "rows": rows,
        },
        **{"ratio_heading": section.ratio_heading, "is_floor": section.is_floor},
    }


def from_document(document: dict[str, object]) -> Section:
    """The section that as_document had, through JSON and back."""
    rows = tuple(
        Row(tuple(labels), tuple(cells), *numbers) for labels, cells, *numbers in document["rows"]
    )
    return Section(**{**document, "headings": tuple(document["headings"]), "rows": rows})
