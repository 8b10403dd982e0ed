"""Versions of engines as packaging orders them, and ranges of them."""

import itertools

import pytest

from fp4convert.engines.versions import read_version, read_versions

# PEP 440, "Summary of permitted suffixes and relative ordering"
IN_ORDER = [
    *("0.32.99", "0.33.dev3", "0.33.0a1", "0.33.0b2", "0.33.0rc1.dev2", "0.33.0rc1", "0.33.0"),
    *("0.33.0.post1.dev4", "0.33rev2", "0.33.1", "1.0"),
]


def test_versions_are_in_the_order_of_pep_440():
    for first, second in itertools.pairwise(map(read_version, IN_ORDER)):
        assert first < second


@pytest.mark.parametrize("text", ["0.33", "v0.33.0", "0.33.0+cu129"])
def test_spellings_of_one_release_are_equal(text):
    assert read_version(text) == read_version("0.33.0")
    assert str(read_version(text)) == text.removeprefix("v")


def test_builds_of_llamacpp_are_in_order():
    assert read_version("b4567") < read_version("b11549")
    assert str(read_version("b4567")) == "b4567"


@pytest.mark.parametrize("text", ["", "new", "0.", "1..2", "0.33rcx", "b", "bb1", "1+", "१"])
def test_text_that_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match=r"[Vv]ersion"):
        read_version(text)


@pytest.mark.parametrize("text", ["=0.5", ">0.5", ">=0.5,>=0.6", "5.x", "<0.5 "])
def test_odd_ranges_are_refused(text):
    with pytest.raises(ValueError, match="range of versions"):
        read_versions(text)


def test_a_range_holds_what_lies_in_it():
    held = read_versions(">=0.5.12,<0.5.22")
    for text, is_in in (
        ("0.5.12", True),
        ("0.5.12+cu129", True),
        ("0.5.21.post1", True),
        ("0.5.12rc1", False),
        ("0.5.22rc1", True),
        ("0.5.22", False),
    ):
        assert (read_version(text) in held) is is_in, text
    assert str(held) == ">=0.5.12,<0.5.22"
