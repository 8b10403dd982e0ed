"""`prune`: the bytes of what stays, in every form that experts are stored in; resuming, parts, the
Hub; and what it refuses.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from calibrations import write_calibration
from checkpoints import (
    FIRST,
    SECOND,
    Tensor,
    disk_nbytes,
    done,
    pack_shard,
    read_folder,
    run,
    values_of,
    weight,
    write_checkpoint,
    write_single,
)
from pruned_deepseek import (
    AHEAD,
    DEEPSEEK,
    MOE,
    SALIENCY,
    calibrated,
    deepseek_shards,
    layer,
    random_tensor,
    statistics,
)

from fp4convert.storage.open import open_source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(
        tmp_path / "source", deepseek_shards(), DEEPSEEK, **{"tokenizer.json": b"{}"}
    )


KEPT = [0, 3, 4, 5]  # two of each group of four


def prune(source: Path, out: Path, *options: object, keep: int = 4) -> dict:
    words = (out, "--calibration", calibrated(Path(source)), "--keep", keep, "--json", *options)
    return done("prune", source, "-o", *words).json


def test_fp8_experts_move_with_their_scales_and_routers_lose_rows(source, tmp_path):
    document = prune(source, tmp_path / "out")
    before, after = read_folder(source), read_folder(tmp_path / "out")
    expected = {
        name: tensor
        for name, tensor in before.items()
        if ".layers.2." not in name and ".experts." not in name
    }
    for name in (f"{MOE}.gate.weight", f"{MOE}.gate.e_score_correction_bias"):
        dtype, shape, _ = before[name]
        expected[name] = (dtype, (4, *shape[1:]), bits_of(before[name])[KEPT].tobytes())
    for number, expert in enumerate(KEPT):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            for part in ("weight", "weight_scale_inv"):
                expected[f"{MOE}.experts.{number}.{leaf}.{part}"] = before[
                    f"{MOE}.experts.{expert}.{leaf}.{part}"
                ]
    assert after == expected
    assert document["experts"] == {"before": 8, "kept": 4, "layers": 1}
    assert document["tensors"] == {"pruned": 26, "copied": 8, "skipped": 0}


def bits_of(tensor: Tensor) -> np.ndarray:
    dtype, shape, data = tensor
    return np.frombuffer(
        data, {"BF16": np.uint16, "F32": np.uint32, "U8": np.uint8}[dtype]
    ).reshape(shape)


def test_a_report_beside_the_source_is_of_another_artifact_and_stays_there(source, tmp_path):
    (source / "quantization_report.json").write_bytes(b"{}")
    prune(source, tmp_path / "out")
    assert not (tmp_path / "out" / "quantization_report.json").exists()


def test_config_and_record_say_what_was_done(source, tmp_path):
    out = tmp_path / "out"
    prune(source, out)
    made = {
        **DEEPSEEK,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 0,
        "vision": {"n_routed_experts": 4, "depth": 3},
    }
    assert json.loads((out / "config.json").read_text()) == made
    record = json.loads((out / "expert_pruning.json").read_text())
    left_out = [name for name in read_folder(source) if ".layers.2." in name]
    assert record["kept"] == {MOE: KEPT}
    assert (record["method"], record["experts"]) == ("reap", {"before": 8, "kept": 4})
    assert record["left_out"] == sorted(left_out)
    assert len(record["calibration"]["sha256"]) == 64
    assert (out / "tokenizer.json").read_bytes() == b"{}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_folder(out).keys()
    done("quantize", out, "--format", "nvfp4", "--scale-rule", "amax", "-o", tmp_path / "four")
    assert (tmp_path / "four" / "expert_pruning.json").exists()


def test_a_layer_that_the_calibration_saw_is_pruned_like_others(source, tmp_path):
    found = {**statistics(), **statistics(AHEAD, SALIENCY[::-1])}
    calibration = calibrated(source, found)
    done("prune", source, "-o", tmp_path / "out", "--calibration", calibration, "--keep", 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    record = json.loads((tmp_path / "out" / "expert_pruning.json").read_text())
    assert (config["num_nextn_predict_layers"], record["left_out"]) == (1, [])
    assert record["kept"] == {MOE: KEPT, AHEAD: [2, 3, 4, 7]}


def test_packed_integers(tmp_path):
    config = {
        "model_type": "kimi_k2",
        "n_routed_experts": 3,
        "num_experts_per_tok": 1,
        "n_group": 1,
    }
    parts = {
        "weight_packed": ("I32", (8, 8)),
        "weight_scale": ("BF16", (8, 2)),
        "weight_shape": ("I64", (2,)),
    }
    names = [f"{MOE}.experts.{expert}.up_proj.{part}" for expert in range(3) for part in parts]
    tensors = {
        name: random_tensor(*parts[name.rpartition(".")[2]], seed)
        for seed, name in enumerate(names)
    }
    tensors[f"{MOE}.gate.weight"] = weight(1, 3)
    source = write_single(tmp_path / "source", tensors, config)
    calibration = calibrated(source, statistics(saliency=[1, 0, 2]))
    done("prune", source, "-o", tmp_path / "out", "--calibration", calibration, "--keep", 2)
    after = read_folder(tmp_path / "out")
    moved = {
        f"{MOE}.experts.{new}.up_proj.{part}": f"{MOE}.experts.{old}.up_proj.{part}"
        for new, old in ((0, 0), (1, 2))
        for part in parts
    }
    assert after == {
        **{new: tensors[old] for new, old in moved.items()},
        f"{MOE}.gate.weight": (
            "BF16",
            (2, 64),
            bits_of(tensors[f"{MOE}.gate.weight"])[[0, 2]].tobytes(),
        ),
    }


def test_stacks_of_mxfp4_lose_slices_and_biases(tmp_path):
    mlp = "model.layers.0.mlp"
    config = {
        **{
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_per_token": 2,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        },
    }
    stacks = {
        f"{mlp}.experts.gate_up_proj_blocks": ("U8", (4, 6, 2, 16)),
        f"{mlp}.experts.gate_up_proj_scales": ("U8", (4, 6, 2)),
        f"{mlp}.experts.gate_up_proj_bias": ("BF16", (4, 6)),
        f"{mlp}.router.weight": ("BF16", (4, 64)),
        f"{mlp}.router.bias": ("BF16", (4,)),
    }
    tensors = {
        name: random_tensor(*entry, seed) for seed, (name, entry) in enumerate(stacks.items())
    }
    tensors["model.layers.0.self_attn.sinks"] = random_tensor("BF16", (4,), 9)
    source = write_single(tmp_path / "source", tensors, config)
    calibration = calibrated(source, statistics(mlp, [4, 1, 2, 3]))
    done("prune", source, "-o", tmp_path / "out", "--calibration", calibration, "--keep", 3)
    sliced = {
        name: (tensors[name][0], (3, *shape[1:]), bits_of(tensors[name])[[0, 2, 3]].tobytes())
        for name, (_, shape) in stacks.items()
    }
    assert read_folder(tmp_path / "out") == {**tensors, **sliced}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **config,
        "num_local_experts": 3,
    }


def test_a_correction_along_the_last_axis(tmp_path):
    mlp = "model.layers.0.mlp"
    tensors = {
        **{f"{mlp}.experts.{expert}.up_proj.weight": weight(expert) for expert in range(4)},
        f"{mlp}.gate.weight": weight(9, 4),
        f"{mlp}.moe_statics.e_score_correction_bias": random_tensor("F32", (1, 4), 3),
    }
    source = write_single(
        tmp_path / "s", tensors, {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2}
    )
    calibration = calibrated(source, statistics(mlp, [1, 4, 0, 2]))
    done("prune", source, "-o", tmp_path / "out", "--calibration", calibration, "--keep", 3)
    found = values_of(read_folder(tmp_path / "out")[f"{mlp}.moe_statics.e_score_correction_bias"])
    assert (
        found == values_of(tensors[f"{mlp}.moe_statics.e_score_correction_bias"])[:, [0, 1, 3]]
    ).all()


def test_a_shard_of_which_nothing_stays_is_none(tmp_path):
    shards = {FIRST: layer(MOE), SECOND: layer(AHEAD)}
    source = write_checkpoint(tmp_path / "source", shards, DEEPSEEK)
    prune(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == [FIRST]
    assert set(
        json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())[
            "weight_map"
        ].values()
    ) == {FIRST}


def test_the_same_bytes_when_resumed_in_parts_and_with_any_number_of_workers(source, tmp_path):
    digest = prune(source, tmp_path / "1", "--workers", 1)["digest"]
    (tmp_path / "1" / SECOND).unlink()
    (tmp_path / "1" / "config.json").unlink()
    again = prune(source, tmp_path / "1")
    assert (again["digest"], again["adopted_bytes"]) == (digest, (source / FIRST).stat().st_size)
    for index in (0, 1):
        assert (
            prune(source, tmp_path / "2", "--shard-index", index, "--num-shards", 2)["share"]["of"]
            == 2
        )
        assert not (tmp_path / "2" / "config.json").exists()
    merged = run("merge", tmp_path / "2", "--json")
    assert (merged.code, merged.json["digest"]) == (0, digest)
    assert prune(source, tmp_path / "3", "--join")["digest"] == digest


def test_another_number_of_experts_is_another_plan(source, tmp_path):
    prune(source, tmp_path / "out")
    options = (
        "prune",
        source,
        "-o",
        tmp_path / "out",
        "--calibration",
        calibrated(source),
        "--keep",
        6,
    )
    assert run(*options).code == 5
    done(*options, "--force")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_routed_experts"] == 6


def test_a_repository_on_the_hub_becomes_what_its_folder_becomes(hub, source, tmp_path):
    hub.add("org/m", source)
    prune(source, tmp_path / "local")
    calibration = calibrated(source)
    given = ("org/m", "-o", tmp_path / "hub", "--calibration", calibration, "--keep", 4, "--json")
    done("prune", *given)
    for path in filter(Path.is_file, (tmp_path / "local").iterdir()):
        found = (tmp_path / "hub" / path.name).read_bytes()
        if path.name == "expert_pruning.json":
            assert {**json.loads(found), "source": None} == {
                **json.loads(path.read_bytes()),
                "source": None,
            }
            assert json.loads(found)["source"]["repo"] == "org/m"
        else:
            assert found == path.read_bytes(), path.name


def test_the_dry_run_lists_what_stays_and_writes_nothing(source, tmp_path):
    document = prune(source, tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    assert document["kept"] == {MOE: KEPT}
    assert document["experts"] == {"before": 8, "kept": 4, "layers": 1}
    written = prune(source, tmp_path / "out")
    for key in ("source_bytes", "output_bytes"):
        assert document[key] == written[key]
    assert disk_nbytes(tmp_path / "out") <= document["peak_disk_bytes"]
    assert {entry["name"] for entry in document["tensors"]} == read_folder(tmp_path / "out").keys()
    asked = ("-o", tmp_path / "x", "--calibration", calibrated(source), "--keep", 4, "--dry-run")
    shown = run("prune", source, *asked)
    assert "experts  8 -> 4 in each of 1 layers" in shown.out
    assert "experts.[0-3]" in shown.out


def test_warnings(source, tmp_path):
    found = statistics(tokens=99)
    found[f"{MOE}.expert_tokens"][:6] = 100
    command = ("-o", tmp_path / "out", "--calibration", calibrated(source, found), "--keep", 6)
    few = done("prune", source, *command)
    assert "2 experts in 1 layers got fewer than 100 tokens, 1 of them kept" in few.err
    assert "6 experts cannot be divided evenly among 4 or 8 ranks of expert parallelism" in few.err
    assert "multi-token-prediction layers are left out" in few.err
    plain = write_checkpoint(
        tmp_path / "plain" / "source", deepseek_shards(is_ahead=False), DEEPSEEK
    )
    calm = done(
        "prune", plain, "-o", tmp_path / "out2", "--calibration", calibrated(plain), "--keep", 4
    )
    assert "predict" not in calm.err
    assert "tokens" not in calm.err


NAN = statistics(saliency=[float("nan"), *SALIENCY[1:]])


@pytest.mark.parametrize(
    ("found", "keep", "words"),
    [
        ({}, 4, f"has no expert_saliency of {MOE}"),
        (NAN, 4, "NaN or Inf"),
        (statistics(saliency=SALIENCY[:4]), 4, "shape [4]; expected 8 experts"),
        (statistics(saliency=[-1, *SALIENCY[1:]]), 4, "negative"),
        (statistics(), 8, "expected a multiple of 2 from 4 to 6"),
        (statistics(), 0, "expected a multiple of 2 from 4 to 6"),
        (statistics(), 5, "2 groups"),
        (statistics(), 2, "each of 2 groups would keep 1 of its experts"),
    ],
    ids=str,
)
def test_a_calibration_or_a_number_that_does_not_fit(found, keep, words, source, tmp_path):
    refused(source, tmp_path, words, calibrated(source, found), keep)


def refused(source: Path, tmp_path: Path, words: str, calibration: Path, keep: int = 4) -> None:
    """Exit 2, one sentence with those words, and nothing written."""
    outcome = run(
        "prune", source, "-o", tmp_path / "out", "--calibration", calibration, "--keep", keep
    )
    assert (outcome.code, outcome.out) == (2, "")
    lines = [line for line in outcome.err.splitlines() if not line.startswith("warning")]
    assert lines[0].startswith("error[")
    assert words in lines[0], outcome.err
    assert len(lines) <= 2
    assert not (tmp_path / "out").exists()


def test_a_calibration_of_other_weights(source, tmp_path):
    calibration = calibrated(source)
    shards = deepseek_shards()
    shards[FIRST] = {
        name: (dtype, shape, data[::-1]) for name, (dtype, shape, data) in shards[FIRST].items()
    }
    write_checkpoint(source, shards, DEEPSEEK)
    refused(source, tmp_path, "other weights of the same model", calibration)


def test_a_router_of_another_size(tmp_path):
    shards = deepseek_shards(is_ahead=False)
    for tensors in shards.values():
        if f"{MOE}.gate.weight" in tensors:
            tensors[f"{MOE}.gate.weight"] = random_tensor("BF16", (9, 64), 1)
    source = write_checkpoint(tmp_path / "source", shards, DEEPSEEK)
    refused(
        source,
        tmp_path,
        "gate.weight is [9, 64]; expected 8 experts along its first axis",
        calibrated(source),
    )


@pytest.mark.parametrize(
    "lacking", [f"{MOE}.experts.3.up_proj.weight", f"{MOE}.experts.7.down_proj.weight_scale_inv"]
)
def test_an_expert_that_lacks_a_tensor(lacking, tmp_path):
    tensors = {name: tensor for name, tensor in layer(MOE).items() if name != lacking}
    source = write_single(tmp_path / "source", tensors, DEEPSEEK)
    refused(source, tmp_path, f"{lacking}: 7 experts have", calibrated(source))


def test_no_router(tmp_path):
    tensors = {name: tensor for name, tensor in layer(MOE).items() if ".gate." not in name}
    source = write_single(tmp_path / "source", tensors, DEEPSEEK)
    refused(source, tmp_path, f"{MOE} has experts and no router", calibrated(source))


def test_records_that_name_single_experts(tmp_path):
    record = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [f"{MOE}.experts.3.up_proj"],
    }
    source = write_checkpoint(
        tmp_path / "source", deepseek_shards(), {**DEEPSEEK, "quantization_config": record}
    )
    refused(source, tmp_path, "names single experts", calibrated(source))


def test_an_artifact_of_ours(source, tmp_path):
    calibration = calibrated(source)
    done("quantize", source, "--format", "nvfp4", "--scale-rule", "amax", "-o", tmp_path / "four")
    refused(tmp_path / "four", tmp_path, "is an artifact of fp4convert", calibration)


def test_an_output_inside_the_source(source):
    outcome = run(
        "prune", source, "-o", source / "out", "--calibration", calibrated(source), "--keep", 4
    )
    assert outcome.code == 2
    assert "inside the source" in outcome.err


def test_a_pruned_checkpoint_can_be_pruned_again(source, tmp_path):
    prune(source, tmp_path / "six", keep=6)
    calibration = calibrated(tmp_path / "six", statistics(saliency=SALIENCY[:6]))
    words = ("-o", tmp_path / "four", "--calibration", calibration, "--keep", 4)
    done("prune", tmp_path / "six", *words)
    assert json.loads((tmp_path / "four" / "config.json").read_text())["n_routed_experts"] == 4


def test_what_only_one_file_holds(tmp_path):
    path = tmp_path / "alone" / "weights.safetensors"
    path.parent.mkdir()
    path.write_bytes(pack_shard(layer(MOE)))
    calibration = write_calibration(tmp_path / "c", open_source(str(path)), statistics())
    refused(path, tmp_path, "no recipe says", calibration)


@pytest.mark.parametrize(
    "entry",
    [("gate.bias", "BF16", (8,)), ("gate.tid2eid", "I64", (160, 2)), ("expert_bias", "F32", (8,))],
)
def test_what_seems_to_go_by_experts_and_no_recipe_knows(entry, tmp_path):
    name, dtype, shape = entry
    tensors = {
        **layer(MOE),
        f"{MOE}.{name}": random_tensor(dtype, shape, 5),
        f"{MOE}.shared_expert_gate.weight": weight(3, 1),
    }
    source = write_single(tmp_path / "source", tensors, DEEPSEEK)
    refused(source, tmp_path, f"{MOE}.{name}", calibrated(source))


def test_a_dry_run_refuses_the_output_that_the_run_would(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    options = ("-o", tmp_path / "out", "--calibration", calibrated(source), "--keep", 4, "--json")
    dry, real = run("prune", source, *options, "--dry-run"), run("prune", source, *options)
    assert (dry.code, dry.json) == (real.code, real.json)
    assert dry.json["error"]["code"] == "foreign-output"
