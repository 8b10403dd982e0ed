"""Modules that engines load as one are found where their formats differ."""

import pytest

from fp4convert.recipes.uneven_formats import Uneven, find_uneven

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EVEN = {f"a.experts.{n}.{leaf}": "nvfp4" for n in (0, 1) for leaf in ("gate_proj", "down_proj")}
EVEN |= {f"b.{leaf}": "nvfp4" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")}
EVEN |= {"embed_tokens": "", "b.gate": "", "b.shared_experts.down_proj": "", "mtp.experts.0.up": ""}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"a.experts.1.down_proj": ""}, [("experts-in-part", "a.experts")]),
        ({"a.experts.1.down_proj": "fp8 row"}, [("experts-in-part", "a.experts")]),
        ({f"a.experts.{n}.down_proj": "" for n in (0, 1)}, [("experts-in-part", "a.experts")]),
        ({"b.v_proj": ""}, [("group-in-part", "b")]),
        ({"b.v_proj": "fp8 row"}, [("group-forms-differ", "b")]),
        ({"b.v_proj": "fp8 row", "b.k_proj": ""}, [("group-forms-differ", "b")]),
        ({"b.o_proj": ""}, []),
        ({f"b.{leaf}_proj": "" for leaf in "qkv"}, []),
    ],
)
def test_what_differs_is_found(changes, expected):
    found = find_uneven(EVEN | changes, GROUPS)
    assert [(each.code, each.parent) for each in found] == expected


def test_it_says_what_is_which():
    found = Uneven("experts-in-part", "a", {"nvfp4": ["a.up", "a.gate"], "": ["a.down"]})
    assert str(found) == "a.up is nvfp4, a.down is not quantized"
