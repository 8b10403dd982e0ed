"""One module that cannot be read, and --exclude that saves the rest."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from checkpoints import LLAMA, Tensor, done, read_folder, run, weight, write_checkpoint

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
MODULES = [f"model.layers.{number}.{part}" for number in (0, 1) for part in PARTS]
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.47"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def codes(dtype: str, *shape: int) -> Tensor:
    return dtype, shape, bytes(0x38 + at % 7 for at in range(shape[0] * shape[1]))


def floats(*shape: int) -> Tensor:
    return "F32", shape, b"\0\0\x80\x3f" * (shape[0] * shape[1] if shape else 1)


def transposed_nvfp4(folder: Path) -> Path:
    """ModelOpt's NVFP4, in which one projection lies transposed."""
    tensors: dict[str, Tensor] = {}
    for module in MODULES:
        turn = -1 if module.endswith("o_proj") else 1
        tensors[f"{module}.weight"] = codes("U8", *(64, 32)[::turn])
        tensors[f"{module}.weight_scale"] = codes("F8_E4M3", *(64, 4)[::turn])
        tensors |= {f"{module}.{end}": floats() for end in ("weight_scale_2", "input_scale")}
    files = {"hf_quant_config.json": json.dumps(MODELOPT).encode()}
    return write_checkpoint(folder, {"model.safetensors": tensors}, LLAMA, **files)


def odd_fp8(folder: Path) -> Path:
    """FP8 of blocks, with scales of another number in one projection."""
    tensors = {f"{module}.weight": codes("F8_E4M3", 256, 256) for module in MODULES}
    for module in MODULES:
        scales = floats(5, 3) if module.endswith("o_proj") else floats(2, 2)
        tensors[f"{module}.weight_scale_inv"] = scales
    config = {**LLAMA, "quantization_config": FP8}
    return write_checkpoint(folder, {"model.safetensors": tensors}, config)


def int8_image(
    folder: Path, mark: bytes | None = b'{"format":"int8_tensorwise","convrot":true}'
) -> Path:
    """A file for ComfyUI with two projections in INT8, which their marks name."""
    tensors: dict[str, Tensor] = {}
    for block in (0, 1):
        tensors[f"double_blocks.{block}.img_mlp.0.weight"] = weight(block, 64)
        module = f"double_blocks.{block}.img_attn.qkv"
        tensors[f"{module}.weight"] = codes("I8", 192, 64)
        tensors[f"{module}.weight_scale"] = floats(3, 1)
        if mark:
            tensors[f"{module}.comfy_quant"] = ("U8", (len(mark),), mark)
    write_checkpoint(folder, {"image.safetensors": tensors}, {})
    (folder / "config.json").unlink()
    return folder / "image.safetensors"


def carried(source: Path, out: Path, ending: str) -> None:
    """The tensors of modules that end so are the same bytes, all of them."""
    before, after = read_folder(source), read_folder(out)
    names = {name for name in before if name.rpartition(".")[0].endswith(ending)}
    assert names
    assert {name: before[name] for name in names} == {name: after.get(name) for name in names}


def test_marked_modules_are_carried_beside_new_ones(tmp_path: Path) -> None:
    """ComfyUI reads each module by its own mark; verify compares their bytes."""
    source, out = int8_image(tmp_path / "m"), tmp_path / "q"
    words = ("--format", "nvfp4", "--dialect", "comfy")
    assert run("quantize", source, *words, "-o", out).code == 2
    made = done("quantize", source, *words, "--exclude", "*.qkv", "-o", out, "--json").json
    assert made["tensors"]["quantized"] == 2
    assert any("carried bit for bit" in each for each in made["warnings"])
    carried(tmp_path / "m", out, ".qkv")
    done("verify", out, "--source", source)
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[data.index(codes("I8", 192, 64)[2])] ^= 1
    shard.write_bytes(data)
    assert run("verify", out, "--source", source).code == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (transposed_nvfp4, ("--format", "nvfp4", "--dialect", "modelopt", "--activations", "4")),
        (odd_fp8, ("--format", "fp8", "--dialect", "deepseek")),
    ],
)
def test_modules_stay_under_the_record_of_the_same_dialect(
    make: object, words: tuple[str, ...], tmp_path: Path
) -> None:
    """It does not list them among the unquantized ones."""
    source, out = make(tmp_path / "m"), tmp_path / "q"  # type: ignore[operator]
    assert run("quantize", source, *words, "-o", out).code == 2
    done("quantize", source, *words, "--exclude", "*o_proj", "-o", out)
    carried(source, out, "o_proj")
    for file in ("config.json", "hf_quant_config.json"):
        if (out / file).exists():
            assert "o_proj" not in (out / file).read_text()


def test_another_dialect_refuses_with_a_step_that_works(tmp_path: Path) -> None:
    source = transposed_nvfp4(tmp_path / "m")
    words = ("quantize", source, "--format", "nvfp4", "--activations", "4", "--exclude", "*o_proj")
    error = run(*words, "-o", tmp_path / "q", "--json").json["error"]
    assert error["code"] == "unsound-artifact"
    assert "is excluded, but nothing in dialect compressed-tensors" in error["message"]
    (option, word) = shlex.split(error["next"].partition("Choose ")[2].partition(",")[0])
    done(*words, option, word, "-o", tmp_path / "q")


@pytest.mark.parametrize(
    "words",
    [
        ("--dialect", "comfy", "--exclude", "double_blocks.0.img_attn.qkv"),  # its kin in block 1
        ("--dialect", "comfy", "--exclude", "*img_mlp.0"),
        ("--exclude", "*.qkv"),
    ],
)
def test_what_is_not_excluded_or_marked_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    source = int8_image(tmp_path / "m")
    for file in (source, int8_image(tmp_path / "n", None)):
        outcome = run("quantize", file, "--format", "nvfp4", *words, "-o", tmp_path / "q", "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "already-quantized")
        assert not (tmp_path / "q").exists()


def test_a_dialect_of_one_format_holds_no_second(tmp_path: Path) -> None:
    """Quark's record knows one scheme: MXFP4 that lies transposed does not stay beside NVFP4."""
    tensors: dict[str, Tensor] = {}
    for module in MODULES:
        turn = -1 if module.endswith("o_proj") else 1
        tensors[f"{module}.weight"] = codes("U8", 64, 32)
        tensors[f"{module}.weight_scale"] = codes("U8", *(64, 2)[::turn])
    scheme = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
    scheme |= {"scale_format": "e8m0", "is_dynamic": False}
    record = {"quant_method": "quark", "global_quant_config": {"weight": scheme}, "exclude": []}
    config = {**LLAMA, "quantization_config": record}
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, config)
    words = ("quantize", source, "--dialect", "quark", "--exclude", "*o_proj", "--format")
    done(*words, "mxfp4", "-o", tmp_path / "same")
    four = ("nvfp4", "--activations", "4", "--input-scale", "1", "-o", tmp_path / "q")
    assert run(*words, *four).code == 2
    assert not (tmp_path / "q").exists()
