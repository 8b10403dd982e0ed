"""Versions are read, and lie in ranges."""

import pytest

from fp4convert.recipes.engine_versions import read_versions


@pytest.mark.parametrize("text", ["=0.5", ">0.5", ">=0.5,>=0.6", "5.x", "<0.5 "])
def test_odd_versions_are_refused(text):
    with pytest.raises(ValueError, match="versions"):
        read_versions(text)
