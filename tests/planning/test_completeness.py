"""No tensor of a source is lost: whatever step is taken out of a plan, the plan is refused."""

import json

import pytest
from checkpoints import run, weight, write_checkpoint, write_llama, write_single
from fp4_sources import make_deepseek_v4, make_gpt_oss, make_nvfp4_ct
from pruned_deepseek import DEEPSEEK, calibrated, deepseek_shards

from fp4convert.planning.plan import Writing

MIXTURE = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 32}}
EXPERTS = "model.language_model.layers.0.mlp.experts"


def mixture(folder):
    """Stacks of experts whose gates and ups take turns in the same bytes."""
    stacks = {
        f"{EXPERTS}.gate_up_proj": ("BF16", (2, 32, 128), weight(1, 64, 128)[2]),
        f"{EXPERTS}.down_proj": ("BF16", (2, 64, 32), weight(2, 64, 64)[2]),
        "model.language_model.norm.weight": ("BF16", (32,), weight(0, 1, 32)[2]),
    }
    return write_single(folder, stacks, MIXTURE)


def llama(folder):
    return write_llama(folder)


def gpt_oss(folder):
    make_gpt_oss(folder)
    return folder


def deepseek(folder):
    make_deepseek_v4(folder)
    return folder


def nvfp4(folder):
    make_nvfp4_ct(folder)
    return folder


def prunable(folder):
    return write_checkpoint(folder, deepseek_shards(), DEEPSEEK)


QUANTIZE = ("quantize", "--format", "nvfp4", "--dry-run")
CASES = {
    "llama": (llama, QUANTIZE),
    "interleaved stacks": (mixture, QUANTIZE),
    "stacks that stay": (mixture, (*QUANTIZE, "--exclude", "*down_proj", "--include", "*gate*")),
    "gpt-oss": (gpt_oss, QUANTIZE),
    "deepseek": (deepseek, QUANTIZE),
    "packed that stays": (deepseek, (*QUANTIZE, "--keep-packed")),
    "nvfp4": (nvfp4, QUANTIZE),
    "dequantize": (nvfp4, ("dequantize",)),
    "dequantize stacks": (gpt_oss, ("dequantize",)),
    "transcode": (nvfp4, ("transcode", "--dialect", "modelopt")),
    "transcode stacks": (gpt_oss, ("transcode", "--dialect", "quark")),
    "prune": (prunable, ("prune", "--keep", "4", "--dry-run")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(4)
def test_whatever_step_a_plan_lacks_it_is_refused(case, tmp_path, monkeypatch):
    make, (command, *words) = CASES[case]
    source, out = make(tmp_path / "source"), tmp_path / "out"
    if command == "prune":
        words += ["--calibration", calibrated(source)]
    arguments = (command, source, "-o", out, *words, "--json")
    real, counted = Writing.task, []

    def count(self, shard, made):
        drafts = list(made)
        counted.extend(drafts)
        return real(self, shard, drafts)

    def drop(self, shard, made):
        kept = [draft for draft in made if draft.specs != lost]
        return real(self, shard, kept)

    monkeypatch.setattr(Writing, "task", count)
    assert run(*arguments, *(() if "--dry-run" in words else ("-q",))).code == 0
    assert len(counted) > 2
    for draft in counted:
        step, lost = draft.step, draft.specs
        monkeypatch.setattr(Writing, "task", drop)
        out = tmp_path / "none"
        outcome = run(command, source, "-o", out, *words, "--json")
        if step.refs:
            error = json.loads(outcome.out)["error"]
            assert (error["code"], error["exit"], outcome.code) == ("tensor-forgotten", 2, 2)
            names = {ref.name.partition("[")[0] for ref in step.refs}
            names |= {one.module for one in step.linears}
            assert error["tensor"].partition("[")[0] in names
            assert not out.exists()


def test_tensors_that_stay_behind_are_told_with_their_reason(tmp_path):
    source = deepseek(tmp_path / "source")
    plan = run("quantize", source, *QUANTIZE[1:], "-o", tmp_path / "out", "--json").json
    assert plan["left_out"] == []
    scaled = {
        "a.q_proj.weight": ("F8_E4M3", (16, 32), bytes(512)),
        "a.q_proj.weight_scale": ("F32", (), b"\0\0\x80\x3f"),
        "a.q_proj.input_scale": ("F32", (), b"\0\0\x80\x3f"),
    }
    record = {"quant_method": "modelopt", "quant_algo": "FP8"}
    fp8 = write_single(tmp_path / "fp8", scaled, {"quantization_config": record})
    plan = run("quantize", fp8, *QUANTIZE[1:], "-o", tmp_path / "out", "--json").json
    reason = "only the engine of the source has a use for it"
    assert plan["left_out"] == [{"name": "a.q_proj.input_scale", "reason": reason}]
    drawn = run("quantize", fp8, *QUANTIZE[1:], "-o", tmp_path / "out").out
    assert f"left out 1 tensor: {reason}" in drawn
