"""Rows of classes -> lines of families and the index, the files of configs/architectures."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layouts import Layout

Row = Mapping[str, Any]
GROUP = 32  # families that are compressed together
KEPT = ("counts", "defaults", "tied_inside", "inner", "skip", "absent", "unexpected")


class Numbers(dict[str, int]):
    """Things by the order in which they were first asked for."""

    def of(self, thing: Any) -> int:
        """Return its number, a new one for a new thing."""
        return self.setdefault(dumped(thing), len(self))

    @property
    def things(self) -> list[Any]:
        """Return them in order."""
        return [json.loads(each) for each in self]


def dumped(thing: Any) -> str:
    """Return it as the files have it."""
    return json.dumps(thing, separators=(",", ":"))


def line_of(family: str, rows: Iterable[Row]) -> str:
    """Return the line of a family of what its classes are made of."""
    ordered = sorted(rows, key=lambda row: row["class"])
    layouts = [each for row in ordered for each in (row["layout"], *_changes(row))]
    parts = sorted(
        {part for layout in layouts for kinds in layout.values() for kind in kinds for part in kind}
    )
    number = {part: place for place, part in enumerate(parts)}
    blocks, renamings = Numbers(), Numbers()

    def block_of(kind: Iterable[str]) -> int:
        return blocks.of(_gaps(sorted(number[part] for part in kind)))

    def packed(layout: Layout) -> dict[str, list[int]]:
        return {
            prefix: sorted(block_of(kind) for kind in kinds) for prefix, kinds in layout.items()
        }

    classes = {}
    for row in ordered:
        one = {"type": row["type"], "base": row["base"], "tied": row["tied"], "ties": row["ties"]}
        one["layout"] = packed(row["layout"])
        one["flips"] = [
            [path, condition, packed(change)] for path, condition, change in row["flips"]
        ]
        one["ends"] = {
            prefix: [[place, has, block_of(parts), *inner] for place, has, parts, *inner in ends]
            for prefix, ends in row.get("ends", {}).items()
        }
        one["words"] = {
            path: {
                prefix: {word: block_of(parts) for word, parts in own.items()}
                for prefix, own in lists.items()
            }
            for path, lists in row.get("words", {}).items()
        }
        one["renamings"] = [renamings.of(each) for each in row["renamings"]]
        one |= {key: row[key] for key in KEPT if key in row}
        classes[row["class"]] = {
            key: value for key, value in one.items() if value not in ([], {}, "")
        }
    line = {"family": family, "parts": parts, "blocks": blocks.things}
    if renamings:
        line["renamings"] = renamings.things
    return dumped({**line, "classes": classes})


def _changes(row: Row) -> list[Layout]:
    return [change for _, _, change in row["flips"]]


def _gaps(numbers: Sequence[int]) -> list[int]:
    return [right - left for left, right in zip((0, *numbers), numbers, strict=False)]


def by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each family, families in order."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    return dict(sorted(families.items()))


def write_source(folder: Path, source: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Write the lines of a package; return what the index says of them."""
    lines = {family: line_of(family, own) for family, own in by_family(rows).items()}
    classes = {row["class"]: row["family"] for row in rows}
    places = write_lines(folder / f"{source}.zlib", lines)
    return {"classes": dict(sorted(classes.items())), "families": places}


def write_lines(file: Path, lines: Mapping[str, str]) -> dict[str, list[int]]:
    """Write lines in compressed groups, so that one group is read for a class.

    Returns  by family: offset and length of its group, and the number of its line there
    """
    places, data, families = {}, b"", list(lines)
    for first in range(0, len(families), GROUP):
        group = families[first : first + GROUP]
        text = "\n".join(lines[family] for family in group)
        packed = zlib.compress(text.encode("ascii"), 9)
        places |= {family: [len(data), len(packed), at] for at, family in enumerate(group)}
        data += packed
    file.write_bytes(data)
    return places
