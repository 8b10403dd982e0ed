"""What GPTQ is told: passes, damping, and layers that saw few tokens."""

import json

import numpy as np
import pytest
from artifacts import artifact_values, quantize
from checkpoints import LAYER, SECOND, read_folder, run, values_of, write_llama, write_single
from made_up_inputs import calibrate, correlated, inputs_of
from refusals import refused

from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source

GPTQ = ("--method", "gptq")
DOWN, GATE = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_proj"


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def gptq_of(source, tmp_path, *options, out="gptq"):
    file = calibrate(tmp_path / "full.safetensors", source, "full")
    return quantize(source, tmp_path / out, "--calibration", file, *GPTQ, *options)


def test_passes_and_damping_make_other_bytes_and_another_plan(source, tmp_path):
    """Under the H that was rounded by every row of a layer costs less with three passes than with
    none; both are in the plan, in the record, and in what transcode makes.
    """
    x = inputs_of(source)[DOWN].astype(np.float64)
    w = values_of(read_folder(source)[f"{DOWN}.weight"])
    h = (x.T @ x / len(x)).astype(np.float32).astype(np.float64)
    h += 0.05 * np.trace(h) / len(h) * np.eye(len(h))
    costs, keys, digests = {}, set(), set()
    for passes in (0, 1, 3):
        gptq_of(source, tmp_path, "--passes", passes, out=str(passes))
        digests.add((tmp_path / str(passes) / SECOND).read_bytes())
        e = artifact_values(read_folder(tmp_path / str(passes)), DOWN, "compressed-tensors") - w
        costs[passes] = np.einsum("ri,ij,rj->r", e, h, e)
    assert (costs[3] <= costs[0]).all()
    assert (costs[1] <= costs[0]).all()
    assert costs[3].sum() < 0.95 * costs[0].sum()
    for options in ((), ("--passes", 1), ("--damping", 0.1)):
        name = "-".join(map(str, options)) or "defaults"
        gptq_of(source, tmp_path, *options, out=name)
        digests.add((tmp_path / name / SECOND).read_bytes())
        keys.add(task_key(source, tmp_path, *options))
    assert (len(digests), len(keys)) == (4, 3)  # the defaults are 0.05 and 3
    outcome = run(
        *("transcode", tmp_path / "--damping-0.1", "-o", tmp_path / "there"),
        *("--dialect", "modelopt"),
    )
    assert outcome.code == 0, outcome.err
    for folder in ("--damping-0.1", "there"):
        record = json.loads((tmp_path / folder / "quantization_config.json").read_text())
        assert (record["method"], record["damping"], record["passes"]) == ("gptq", 0.1, 3)


def task_key(source, tmp_path, *options):
    """The key of the task of all weights, and what a dry run says of these options."""
    file = tmp_path / "full.safetensors"
    command = ("--format", "nvfp4", "--calibration", file, *GPTQ, *options)
    document = run("quantize", source, *command, "--dry-run", "--json").json
    wanted = dict(zip(options[::2], options[1::2], strict=True))
    assert document["damping"] == wanted.get("--damping", 0.05)
    assert document["passes"] == wanted.get("--passes", 3)
    given = QuantizeOptions(
        str(source),
        format="nvfp4",
        calibration=str(file),
        method="gptq",
        damping=wanted.get("--damping"),
        passes=wanted.get("--passes"),
    )
    return max(
        prepare_quantize(take_apart(open_source(str(source)), given)).tasks,
        key=lambda task: task.source_bytes,
    ).key


@pytest.mark.parametrize(("tokens", "is_few"), [(15, True), (16, False)])
def test_a_layer_that_saw_few_tokens_is_rounded_to_the_nearest(tokens, is_few, source, tmp_path):
    """By the rule; the others of its scale group are not, and the plan says which."""
    inputs = inputs_of(source)
    inputs[DOWN] = inputs[DOWN][:tokens]
    calibrated = calibrate(tmp_path / "few.safetensors", source, "full", inputs)
    options = ("--calibration", calibrated, "--scale-rule", "importance")
    found = quantize(source, tmp_path / "gptq", *options, "--method", "gptq")
    quantize(source, tmp_path / "importance", *options)
    by_gptq, nearest = (read_folder(tmp_path / name) for name in ("gptq", "importance"))
    for module in (DOWN, GATE):
        name = f"{module}.weight_packed"
        assert (by_gptq[name] == nearest[name]) == (is_few and module == DOWN)
    plan = quantize(source, tmp_path / "plan", *options, "--method", "gptq", "--dry-run")[
        "warnings"
    ]
    told = [warning for warning in (*plan, *found.get("warnings", ())) if "too few" in warning]
    assert bool(told) == is_few
    for warning in told:
        assert "1 modules saw too few tokens for --method gptq" in warning
        assert f"rule importance; the first is '{DOWN}', with 15 tokens" in warning


@pytest.mark.parametrize("columns", [1024])
def test_few_tokens_are_fewer_than_a_share_of_the_columns(columns, tmp_path):
    """A 32nd of a block of H; the whole of it, or of 128."""
    name = f"{DOWN}.weight"
    normal = np.random.default_rng(0).standard_normal((16, columns), np.float32)
    tensors = {name: ("F32", (16, columns), normal.tobytes())}
    source = write_single(tmp_path / "source", tensors, {"model_type": "llama"})
    for gram, tokens, is_few in (
        ("full", 31, True),
        ("full", 32, False),
        ("block:128", 31, False),
        ("block:128", 15, True),
    ):
        x = {DOWN: correlated(columns, tokens)}
        file = calibrate(tmp_path / f"{tokens}.safetensors", source, gram, x)
        given = ("--calibration", file, "--method", "gptq", "--dry-run")
        warnings = quantize(source, tmp_path / "out", *given)["warnings"]
        assert any("too few tokens" in warning for warning in warnings) == is_few


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--damping", "0.1"), "idle-option", "--damping 0.1 is for --method gptq"),
        (
            ("--passes", "0"),
            "idle-option",
            "--passes 0 is for --method gptq, and the method is rtn",
        ),
        ((*GPTQ, "--damping", "0"), "bad-damping", "expected above 0, at most 1"),
        ((*GPTQ, "--damping", "nan"), "bad-damping", "--damping nan"),
        ((*GPTQ, "--damping", "1.5"), "bad-damping", "--damping 1.5"),
        ((*GPTQ, "--passes", "-1"), "bad-passes", "expected 0 to 100"),
        ((*GPTQ, "--passes", "101"), "bad-passes", "--passes 101"),
    ],
)
def test_settings_that_cannot_be_or_have_no_use_are_refused(options, code, words, source, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    error = refused(source, tmp_path, "--calibration", file, *options)
    assert error["code"] == code
    assert words in error["message"]
