"""A row is about the artifacts that its condition names."""

from engine_contents import contents

from fp4convert.engines.rows import Condition

CT = "compressed-tensors"


def test_conditions_ask_for_all_that_they_name():
    made = contents(CT, "nvfp4", "mxfp4 experts", "fp8 row")
    assert Condition().fits(made)
    assert Condition(formats=("mxfp4",), has_experts=True, has_others=False).fits(made)
    assert Condition(formats=("nvfp4",), has_experts=False, has_others=True).fits(made)
    assert not Condition(formats=("nvfp4",), has_experts=True).fits(made)
    assert Condition(beside=("fp8*",), is_mixed=True).fits(made)
    assert not Condition(beside=("int4",)).fits(made)
    assert not Condition(not_models=("lla*",)).fits(made)
    assert not Condition(classes=("LlamaForCausalLM",)).fits(made)
    assert not Condition(findings=("scale-layout",)).fits(made)
    assert Condition(files=("consolidated*",)).fits(
        made._replace(files={"consolidated.safetensors"})
    )
    assert not Condition(files=("consolidated*",)).fits(made._replace(files={"model.safetensors"}))
    assert not Condition().fits(contents(CT, "fp8 row")), "rows are about four-bit modules"
