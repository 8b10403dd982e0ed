"""The site's gallery: each family has a command whose plan can be made."""

import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from family import Family
from gallery import PUBLISHED, SHOWN, newest, section

pytestmark = pytest.mark.engine


@pytest.mark.sweep(18)
@pytest.mark.parametrize("family", SHOWN, ids=str)
def test_a_section_has_a_plan_that_quantizes(family: Family) -> None:
    text = section(family)
    assert text.startswith(f"## {family.name}\n")
    assert "FP4 |" in text
    assert "| kept |" in text


def test_published_models_are_of_families_that_are_shown() -> None:
    assert {family for family, _ in PUBLISHED.values()} <= {family.name for family in SHOWN}
    assert "`default`" in newest()
