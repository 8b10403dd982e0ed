"""docs/gallery.md: each command's plan can be made, and is the one that the page shows."""

import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from family import Family
from gallery import HEAD, PAGE, PUBLISHED, SHOWN, section

pytestmark = pytest.mark.engine
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.sweep(18)
@pytest.mark.parametrize("family", SHOWN, ids=str)
def test_sections_are_up_to_date(family: Family) -> None:
    """After a change on purpose: make docs."""
    assert section(family) in TEXT


def test_the_page_has_a_section_for_each_family() -> None:
    names = [line.removeprefix("## ") for line in TEXT.splitlines() if line.startswith("## ")]
    assert names == [*(family.name for family in SHOWN), "The newest text families"]
    assert {family for family, _ in PUBLISHED.values()} <= {*names}
    assert TEXT.startswith(HEAD)
