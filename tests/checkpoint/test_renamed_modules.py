"""Records name what stays as the checkpoint calls it, and as engines do."""

import re

import pytest
from typed_records import CT, MO

from fp4convert.checkpoint.dialects.base import Ignored
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.numerics.formats import FP8, MXFP4, NVFP4

# A kept tower, a kept layer and a quantized one, and what engines call them.
NAMED = {
    "vit.layers.0.fc1": ("model.tower.layers.0.mlp.fc1",),
    "vit.layers.1.fc1": ("model.tower.layers.1.mlp.fc1",),
    "model.layers.0.conv.in_proj": ("model.layers.0.short_conv.in_proj",),
    "model.layers.0.up": ("model.text.layers.0.up",),
}
KEPT = Ignored(tuple(NAMED)[:3], ("vit.*", "*.conv.in_proj"), NAMED)
NAMED_NVFP4 = Group(Form(NVFP4), ("model.layers.0.up",))


def test_expressions_fit_what_engines_call_a_kept_module():
    """vLLM renames exact names, and no expressions; transformers renames nothing."""
    record = dialect_named(CT).records([NAMED_NVFP4], KEPT)["config.json"]["quantization_config"]
    assert record["ignore"] == [
        r"re:vit\..*$",
        r"re:.*\.conv\.in_proj$",
        "vit.layers.0.fc1",
        "vit.layers.1.fc1",
        r"re:(?:.*\.)?layers\.\d+\.mlp\.fc1$",
        r"re:(?:.*\.)?layers\.\d+\.short_conv\.in_proj$",
    ]


@pytest.mark.parametrize("dialect", [MO, "quark"])
def test_names_that_engines_use_are_listed_where_records_hold_names(dialect):
    form = Form(MXFP4) if dialect == "quark" else Form(NVFP4)
    group = NAMED_NVFP4._replace(form=form)
    record = dialect_named(dialect).records([group], KEPT)["config.json"]["quantization_config"]
    listed = record["exclude" if dialect == "quark" else "ignore"]
    assert listed == [
        *("vit.layers.0.fc1", "vit.layers.1.fc1", "model.layers.0.conv.in_proj"),
        *("model.tower.layers.0.mlp.fc1", "model.tower.layers.1.mlp.fc1"),
        *("model.layers.0.short_conv.in_proj", "vit.*", "*.conv.in_proj"),
    ]


def test_a_name_that_a_quantized_module_has_too_is_not_listed():
    renamed = {"a.up": ("b.up",), "b.up": ("c.up",)}
    ignored = Ignored(("a.up",), ("a.*",), renamed)
    group = Group(Form(NVFP4), ("b.up",))
    record = dialect_named(CT).records([group], ignored)["config.json"]["quantization_config"]
    assert record["ignore"] == [r"re:a\..*$", "a.up"]
    record = dialect_named(MO).records([group], ignored)["config.json"]["quantization_config"]
    assert record["ignore"] == ["a.up", "a.*"]


def test_groups_of_several_formats_name_modules_as_engines_do():
    names = "layers.0.mamba.in", "layers.0.mixer.in", "layers.0.mlp.up"
    ignored = Ignored((), (), {names[0]: (names[1],)})
    groups = [
        Group(Form(NVFP4), (names[0],)),
        Group(Form(FP8, 8, granularity="tensor", stored_scales="F32"), (names[2],)),
    ]
    record = dialect_named(MO).records(groups, ignored)["config.json"]["quantization_config"]
    assert sorted(record["quantized_layers"]) == list(names)
    record = dialect_named(CT).records(groups, ignored)["config.json"]["quantization_config"]
    four_bit = record["config_groups"]["group_0"]["targets"]
    fits = [any(re.match(each[3:], name) for each in four_bit) for name in names]
    assert fits == [True, True, False]
