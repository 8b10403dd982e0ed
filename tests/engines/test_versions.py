"""Versions are read and compared as PEP 440 has them: `packaging` is the judge."""

import itertools

import pytest

from fp4convert.engines.versions import read_version, read_versions

WRITTEN = [
    *("0.33", "0.33.0", "0.33.0rc1", "0.33.0rc2", "0.33.0+cu129", "0.33.0rc1+cu129.local", "1.0"),
    *("0.33.1", "0.33.dev3", "0.33.0a1", "0.33.0b2", "0.33.0.post1", "0.33.0rc1.dev2", "v0.9"),
    *("0.33.0.post1.dev4", "0.33.0-alpha.1", "0.33.0c3", "0.33.0preview4", "0.32.99", "0.33rev2"),
]


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(WRITTEN, 2)])
def test_versions_are_in_the_order_of_packaging(first, second):
    version = pytest.importorskip("packaging.version").Version

    def public(text):
        return version(version(text).public)  # what a build adds says nothing of the code

    ours = (read_version(first), read_version(second))
    theirs = (public(first), public(second))
    assert (ours[0] < ours[1], ours[0].key == ours[1].key) == (
        theirs[0] < theirs[1],
        theirs[0] == theirs[1],
    )


def test_builds_of_llamacpp_are_in_order():
    assert read_version("b4567") < read_version("b11549")
    assert str(read_version("b4567")) == "b4567"


@pytest.mark.parametrize(
    "text", ["", "new", "0.", "1..2", "0.33rcx", "b", "bb1", "1.0 ", "1+", "१"]
)
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match="is no version"):
        read_version(text)


@pytest.mark.parametrize("text", ["=0.5", ">0.5", ">=0.5,>=0.6", "5.x", "<0.5 "])
def test_odd_versions_are_refused(text):
    with pytest.raises(ValueError, match="versions"):
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
