"""Our own record, quantization_config.json, of artifacts with one form and with several."""

import pytest

from fp4convert.checkpoint.dialects.base import Ignored
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.modules import form_finder
from fp4convert.checkpoint.record import (
    RecordContents,
    describe_form,
    describe_groups,
    groups_recorded,
    make_record,
)
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FP8, INT4, MXFP4, NVFP4
from fp4convert.recipes.recipe import Target

PRODUCER = {"name": "fp4convert", "version": "1"}
ORIGIN: dict[str, object] = {"repo": "a/b", "revision": None}
NVFP4_KEYS = {
    "format": "nvfp4",
    "block_size": 16,
    "element_dtype": "fp4_e2m1",
    "scale_dtype": "fp8_e4m3",
    "scale_layout": "linear",
    "scale_padding": None,
    "nibble_order": "low_first",
    "block_axis": -1,
    "global_scale": {"dtype": "fp32", "stored_as": "divisor"},
    "activations": 16,
}
FP8_KEYS = {
    "format": "fp8",
    "block_size": None,
    "granularity": "row",
    "element_dtype": "fp8_e4m3",
    "scale_dtype": "fp32",
    "scale_layout": "linear",
    "scale_padding": None,
    "nibble_order": None,
    "block_axis": -1,
    "global_scale": None,
    "activations": 8,
}
REST = {
    "dialect": "compressed-tensors",
    "scale_rule": "amax",
    "method": None,
    "calibration": None,
    "ignore": ["lm_head"],
    "producer": PRODUCER,
    "source": ORIGIN,
}


def record_of(*groups: Group) -> dict[str, object]:
    target = Target("nvfp4", "compressed-tensors", "amax")
    return make_record(
        target, RecordContents(groups, Ignored((), ("lm_head",)), {}), PRODUCER, ORIGIN
    )


def test_a_record_of_one_form_says_it_at_its_top():
    assert record_of(Group(Form(NVFP4), ("l.0.up", "l.1.up"))) == {**NVFP4_KEYS, **REST}


def test_a_record_of_several_forms_says_them_by_pattern():
    groups = (
        Group(Form(NVFP4), ("l.0.up", "l.1.up", "l.1.q")),
        Group(Form(FP8, 8, granularity="row"), ("l.0.q",)),
        Group(Form(FP8, granularity=(128, 128), stored_scales="BF16"), ("l.0.o", "l.1.o")),
    )
    block = {
        **FP8_KEYS,
        "block_size": [128, 128],
        "granularity": "block",
        "scale_dtype": "bf16",
        "activations": 16,
    }
    record = record_of(*groups)
    assert record == {
        "format": "mixed",
        "modules": [
            {"pattern": r"re:l\.\d+\.up$", **NVFP4_KEYS},
            {"pattern": r"re:l\.1\.q$", **NVFP4_KEYS},
            {"pattern": r"re:l\.0\.q$", **FP8_KEYS},
            {"pattern": r"re:l\.\d+\.o$", **block},
        ],
        **REST,
    }
    find = form_finder(groups_recorded(record))
    assert [find(name) for group in groups for name in group.modules] == [
        group.form for group in groups for _ in group.modules
    ]
    assert find("l.0.k") is None


@pytest.mark.parametrize(
    "form",
    [
        Form(MXFP4, 4),
        Form(NVFP4, kv_cache="fp8"),
        Form(FP8, granularity="tensor", kv_cache="fp8"),
        Form(FP8, 8, granularity=(32, 32), stored_scales="F16"),
        Form(INT4, granularity=(1, 32), stored_scales="BF16"),
    ],
)
def test_every_form_is_read_as_it_was_written(form):
    first = Form(NVFP4, kv_cache=form.kv_cache)
    groups = groups_recorded(record_of(Group(first, ("a",)), Group(form, ("b",))))
    assert (form_finder(groups)("a"), form_finder(groups)("b")) == (first, form)


@pytest.mark.parametrize(
    "changes",
    [
        {"modules": []},
        {"modules": None},
        {"modules": ["nvfp4"]},
        {"modules": [{**FP8_KEYS, "pattern": "a", "granularity": "column"}]},
        {"modules": [{**FP8_KEYS, "pattern": "a", "granularity": "block"}]},
        {"modules": [{**FP8_KEYS, "pattern": "a", "granularity": "block", "block_size": [0, 128]}]},
        {"modules": [{**NVFP4_KEYS, "pattern": "a", "format": "nvfp5"}]},
    ],
)
def test_a_record_that_says_nothing_of_its_modules_is_bad_input(changes):
    with pytest.raises(InputError) as refused:
        groups_recorded({"format": "mixed", "dialect": "compressed-tensors", **changes})
    assert refused.value.code in ("record-modules", "unknown-format")


@pytest.mark.parametrize("cache", ["int3", ["fp8"], {}, 0])
def test_a_cache_that_its_dialect_lacks_is_refused(cache):
    record = {**NVFP4_KEYS, "dialect": "compressed-tensors", "kv_cache": cache}
    with pytest.raises(InputError, match="kv_cache"):
        groups_recorded(record)


def test_forms_in_words():
    groups = (
        Group(Form(NVFP4), ()),
        Group(Form(FP8, granularity=(128, 128)), ()),
        Group(Form(FP8, granularity="row"), ()),
    )
    assert describe_groups(groups) == "nvfp4 + fp8 128x128 + fp8 row"


def test_a_record_says_the_padding_of_a_layout():
    """Rows and blocks are padded to multiples of these; None where a layout pads nothing."""
    known = {
        "linear": None,
        "128x4": [128, 4],
        "8x4": [8, 4],
        "deepgemm": [4, 4],
        "k_major": None,
        "interleaved": None,
        "appended": None,
        "gguf": None,
    }
    plain = dialect_named("plain")
    told = {name: describe_form(Form(NVFP4, 16, name), plain) for name in known}
    assert {name: entry["scale_padding"] for name, entry in told.items()} == known
