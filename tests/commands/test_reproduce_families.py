"""Honest artifacts are reproduced, all of them: every family, in every dialect and format that
holds it, made with one set of instructions of this processor and reproduced with each.
"""

import shutil

import pytest
from checkpoints import run
from cpu_levels import NATIVE, every_level
from families import FAMILIES
from family import build

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.numerics.formats import FORMATS

LIBRARY = "fp4convert.numerics.backends.cpu.cpu_library"


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    return every_level(tmp_path_factory.mktemp("levels"))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_in_every_dialect_and_format_at_every_level(
    family, levels, tmp_path, monkeypatch
):
    source, made = build(family, tmp_path / "source"), 0
    for number, (dialect, fmt) in enumerate((d, f) for d in DIALECTS for f in FORMATS):
        out = tmp_path / "out"
        numbers = sorted(levels)
        own = numbers[number % len(numbers)]
        monkeypatch.setattr(LIBRARY, lambda: levels[own]._library)  # noqa: B023
        words = ("quantize", source, "--format", fmt, "--dialect", dialect, "-o", out)
        outcome = run(*words, "--json", "-q")
        if outcome.code == 2:
            assert not out.exists(), outcome
            continue
        assert outcome.code == 0, (dialect, fmt, outcome)
        made += 1
        for level in numbers:
            monkeypatch.setattr(LIBRARY, lambda: levels[level]._library)  # noqa: B023
            assert levels[level]._library.fp4_level(0) == level
            again = run("reproduce", out, "--source", source, "--json")
            assert again.code == 0, (dialect, fmt, own, level, again)
            assert again.json["reproduced"] is True
        shutil.rmtree(out)
    assert made >= 2, "no dialect holds it"
    assert max(levels) == NATIVE
