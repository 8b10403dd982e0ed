"""Files for ComfyUI in every spelling that it reads or that was published.

Named in the header alone, marked, of 2024, marked with zeros, unmarked, under AWQ's factors.  All
commands read each alike; the decoder here is typed from QUANTIZATION.md and comfy/ops.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, done, pack_shard, read_folder, run, values_of, write_checkpoint

ROWS, COLUMNS = 192, 256
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.array(
    [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)],
    np.float32,
)
WORDS = {"nvfp4": "nvfp4", "fp8": "float8_e4m3fn"}
PREFIX = "model.diffusion_model.blocks"


def nvfp4(stem: str, seed: int, height: int = ROWS) -> tuple[dict[str, Tensor], np.ndarray]:
    """A module as ComfyUI stores it, and its values."""
    dice = np.random.default_rng(seed)
    codes = dice.integers(0, 16, (height, COLUMNS), np.uint8)
    blocks = COLUMNS // 16
    rows = np.exp2(dice.normal(0, 1.5, (height, 1)) + dice.normal(0, 1, (1, blocks)))
    scales = np.clip(np.searchsorted(E4M3[:127], rows), 1, 120).astype(np.uint8)
    r, b = np.meshgrid(np.arange(height), np.arange(blocks), indexing="ij")
    stored = np.zeros(-(-height // 128) * 128 * blocks, np.uint8)
    at = (r // 128 * (blocks // 4) + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4
    stored[at] = scales
    factor = np.float32(0.0123)
    values = E2M1[codes] * np.repeat(E4M3[scales] * factor, 16, axis=1)
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    return {
        f"{stem}.weight": ("U8", packed.shape, packed.tobytes()),
        f"{stem}.weight_scale": ("F8_E4M3", (256, blocks), stored.tobytes()),
        f"{stem}.weight_scale_2": ("F32", (), factor.tobytes()),
    }, values


def fp8(
    stem: str, seed: int, ending: str = ".weight_scale"
) -> tuple[dict[str, Tensor], np.ndarray]:
    dice = np.random.default_rng(seed)
    codes = dice.integers(0, 120, (ROWS, COLUMNS), np.uint8)
    codes |= dice.integers(0, 2, codes.shape, np.uint8) << 7
    factor = np.float32(0.0321)
    values = np.where(codes < 128, 1, -1).astype(np.float32) * E4M3[codes & 127] * factor
    return {
        f"{stem}.weight": ("F8_E4M3", codes.shape, codes.tobytes()),
        stem + ending: ("F32", (), factor.tobytes()),
    }, values


class Made:
    """A file of four modules, half of them FP8 unless it is all of one format."""

    def __init__(self, *formats: str, ending: str = ".weight_scale") -> None:
        self.tensors: dict[str, Tensor] = {"norm.scale": ("F32", (2,), b"\0\0\x80\x3f" * 2)}
        self.values: dict[str, np.ndarray] = {}
        self.formats: dict[str, str] = {}
        for number in range(4):
            stem, word = f"{PREFIX}.{number}.proj", formats[number % len(formats)]
            made = nvfp4(stem, number) if word == "nvfp4" else fp8(stem, number, ending)
            self.tensors |= made[0]
            self.values[stem] = made[1]
            self.formats[stem] = WORDS[word]

    def mark(self, stem: str, text: bytes | None = None) -> None:
        text = json.dumps({"format": self.formats[stem]}).encode() if text is None else text
        self.tensors[f"{stem}.comfy_quant"] = ("U8", (len(text),), text)

    def header(self) -> dict[str, object]:
        layers = {stem: {"format": word} for stem, word in self.formats.items()}
        return {"_quantization_metadata": json.dumps({"layers": layers})}


def spell(spelling: str) -> tuple[Made, dict[str, object] | None, list[str]]:
    """A file in that spelling, its header's metadata, and the errors that inspect finds."""
    made, metadata, faults = Made("nvfp4", "fp8"), None, []
    if spelling == "header":
        metadata = made.header()
    elif spelling == "marked-fp8":
        made = Made("fp8")
    elif spelling == "old":
        made = Made("fp8", ending=".scale_weight")
        made.tensors["model.diffusion_model.scaled_fp8"] = ("F8_E4M3", (2,), b"\0\0")
        for stem in made.values:
            made.tensors[f"{stem}.scale_input"] = ("F32", (), b"\0\0\x80\x3f")
    elif spelling == "unmarked":
        faults = ["unmarked"]
    elif spelling == "zeros":
        made.tensors["first.weight"] = ("BF16", (64, 64), b"\x80\x3f" * 4096)
        made.formats["first"] = "nvfp4"
        faults = ["label-differs", "marked-plain"]
    elif spelling == "awq":
        stem = f"{PREFIX}.0.proj"
        factors = np.exp2(np.random.default_rng(9).normal(0, 1, COLUMNS)).astype(np.float32)
        made.tensors[f"{stem}.pre_quant_scale"] = ("F32", (COLUMNS,), factors.tobytes())
        made.values[stem] = made.values[stem] * factors
    elif spelling == "int8":  # as the text encoder of MiniMax H3 has its embedding
        codes = np.random.default_rng(8).integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
        rows = np.exp2(np.random.default_rng(7).integers(-9, 9, (ROWS, 1))).astype(np.float32)
        made.values["model.embed_tokens"] = codes.astype(np.float32) * rows
        made.tensors["model.embed_tokens.weight"] = ("I8", codes.shape, codes.tobytes())
        made.tensors["model.embed_tokens.weight_scale"] = ("F32", rows.shape, rows.tobytes())
        made.tensors["model.embed_tokens.comfy_quant"] = ("U8", (29,), bytes(29))
    if spelling not in ("header", "old", "unmarked"):
        for stem in made.formats:
            is_zero = spelling == "zeros" and stem in (f"{PREFIX}.1.proj", "first")
            made.mark(stem, bytes(27) if is_zero else None)
    return made, metadata, faults


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, object] | None) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack_shard(tensors, metadata))
    return path


def restored(folder: Path, made: Made) -> None:
    found = read_folder(folder)
    for stem, expected in made.values.items():
        np.testing.assert_array_equal(
            values_of(found[f"{stem}.weight"]), expected.astype(np.float64)
        )
    stray = [n for n in found if n.endswith(("comfy_quant", "scaled_fp8", "pre_quant_scale"))]
    assert stray == []


SPELLINGS = ["header", "marked", "marked-fp8", "old", "zeros", "unmarked", "awq", "int8"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_command_reads_it(spelling: str, tmp_path: Path) -> None:
    made, metadata, faults = spell(spelling)
    file = write(tmp_path / "in" / "m.safetensors", made.tensors, metadata)
    looked = run("inspect", file, "--json").json
    assert (looked["dialect"], looked["tensors"]["quantized"]) == ("comfy", 4)
    found = {one["code"] for one in looked["findings"] if one["level"] == "error"}
    assert sorted(found) == faults
    done("dequantize", file, "-o", tmp_path / "floats", "--dtype", "fp32", "-q")
    restored(tmp_path / "floats", made)
    original = {f"{stem}.weight": ("F32", v.shape, v.tobytes()) for stem, v in made.values.items()}
    others = {n: made.tensors[n] for n in ("norm.scale", "first.weight") if n in made.tensors}
    source = write(tmp_path / "src" / "m.safetensors", {**original, **others}, None)
    checked = run("verify", file, "--source", source, "--json").json
    assert {one["code"] for one in checked["findings"] if one["level"] == "error"} == {*faults}
    assert [one["mse"] for one in checked["tensors"]] == pytest.approx(
        [0] * len(made.values), abs=1e-13
    )
    again = tmp_path / "again"
    done("quantize", file, "--format", "nvfp4", "--dialect", "comfy", "-o", again, "-q")
    names = read_folder(again).keys()
    marked = {n.removesuffix(".comfy_quant") for n in names if n.endswith(".comfy_quant")}
    assert marked == {n.removesuffix(".weight_scale_2") for n in names if n.endswith("_scale_2")}
    assert not [n for n in names if n.endswith(("scaled_fp8", "pre_quant_scale"))]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_transcode_marks_it_bit_for_bit(spelling: str, tmp_path: Path) -> None:
    made, metadata, _ = spell(spelling)
    file = write(tmp_path / "in" / "m.safetensors", made.tensors, metadata)
    asked = ("transcode", file, "--dialect", "comfy", "-o", tmp_path / "out")
    if spelling == "awq":
        refused = run(*asked, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, "not-lossless")
        assert "pre_quant_scale" in refused.json["error"]["message"]
        return
    done(*asked, "-q")
    assert run("inspect", tmp_path / "out", "--json").json["healthy"]
    now = read_folder(tmp_path / "out")
    for stem in made.formats.keys() & made.values.keys():
        assert json.loads(now[f"{stem}.comfy_quant"][2]) == {"format": made.formats[stem]}
        for ending in (".weight", ".weight_scale", ".weight_scale_2"):
            old = made.tensors.get(stem + ending) or made.tensors.get(f"{stem}.scale_weight")
            assert stem + ending not in now or now[stem + ending] == old
    done("dequantize", tmp_path / "out", "-o", tmp_path / "floats", "--dtype", "fp32", "-q")
    restored(tmp_path / "floats", made)


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (b'{"format": "int8_tensorwise"}', True),
        (b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}', False),
    ],
)
def test_bytes_that_may_be_rotated_are_left_unread(text: bytes, is_read: bool, tmp_path) -> None:
    made, metadata, _ = spell("int8")
    made.tensors["model.embed_tokens.comfy_quant"] = ("U8", (len(text),), text)
    file = write(tmp_path / "in" / "m.safetensors", made.tensors, metadata)
    made_of = run("dequantize", file, "-o", tmp_path / "out", "--json")
    assert made_of.code == (0 if is_read else 2), made_of.err
    found = {one["code"] for one in run("inspect", file, "--json").json["findings"]}
    assert ("stack-unread" in found) is not is_read


@pytest.mark.parametrize(
    ("ending", "maker"),
    [(".smooth_factor_orig", "Nunchaku"), (".nvfp4_block_scale", "musubi-tuner")],
)
def test_codes_of_other_makers_are_named_by_every_command(ending, maker, tmp_path) -> None:
    tensors = {"a.weight": ("U8", (64, 32), bytes(2048)), f"a{ending}": ("F32", (64,), bytes(256))}
    file = write(tmp_path / "in" / "m.safetensors", tensors, None)
    out = ("-o", tmp_path / "out", "--json")
    for words in (
        ("inspect", file, "--json"),
        ("verify", file, "--json"),
        ("dequantize", file, *out),
        ("transcode", file, "--dialect", "comfy", *out),
        ("quantize", file, "--format", "nvfp4", *out),
    ):
        refused = run(*words)
        assert (refused.code, maker in refused.json["error"]["message"]) == (2, True), words


def test_row_scales_go_where_a_dialect_holds_them(tmp_path: Path) -> None:
    """ComfyUI's kernels take one scale for a matrix (comfy_kitchen, tensor/fp8)."""
    made = Made("fp8")
    for number, stem in enumerate(made.values):
        rows = np.exp2(np.random.default_rng(number).normal(0, 1, (ROWS, 1))).astype(np.float32)
        made.tensors[f"{stem}.weight_scale"] = ("F32", (ROWS, 1), rows.tobytes())
        made.values[stem] = made.values[stem] / np.float32(0.0321) * rows
        made.mark(stem)
    file = write(tmp_path / "in" / "m.safetensors", made.tensors, None)
    assert run("inspect", file, "--json").json["granularity"] == "row"
    refused = run("transcode", file, "--dialect", "comfy", "-o", tmp_path / "out", "--json").json
    assert "held as it is by compressed-tensors" in refused["error"]["message"]
    moved = tmp_path / "moved"
    done("transcode", file, "--dialect", "compressed-tensors", "-o", moved, "-q")
    for folder, words in ((file, "direct"), (moved, "over")):
        done("dequantize", folder, "-o", tmp_path / words, "--dtype", "fp32", "-q")
    direct, over = (read_folder(tmp_path / words) for words in ("direct", "over"))
    for stem, expected in made.values.items():
        assert direct[f"{stem}.weight"] == over[f"{stem}.weight"]
        np.testing.assert_allclose(values_of(direct[f"{stem}.weight"]), expected, rtol=1e-6)


@pytest.mark.parametrize("command", ["dequantize", "quantize"])
def test_factors_of_another_shape_are_refused_before_anything_is_written(
    command: str, tmp_path: Path
) -> None:
    made, metadata, _ = spell("awq")
    made.tensors[f"{PREFIX}.0.proj.pre_quant_scale"] = ("F32", (1,), bytes(4))
    file = write(tmp_path / "in" / "m.safetensors", made.tensors, metadata)
    words = ("--format", "nvfp4") if command == "quantize" else ()
    refused = run(command, file, *words, "-o", tmp_path / "out", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "scales-shape")
    assert not (tmp_path / "out").exists()


def test_unmarked_weights_in_another_layout_are_refused_alike(tmp_path: Path) -> None:
    """ModelOpt's scales are linear: read as ComfyUI's they would be other weights, in silence."""
    tensors: dict[str, Tensor] = {}
    for number in range(4):
        stem = f"{PREFIX}.{number}.proj"
        tensors |= nvfp4(stem, number, height=256)[0]
        stored = np.frombuffer(tensors[f"{stem}.weight_scale"][2], np.uint8)
        linear = np.ascontiguousarray(stored.reshape(2, 4, 32, 4, 4).transpose(0, 3, 2, 1, 4))
        tensors[f"{stem}.weight_scale"] = ("F8_E4M3", (256, 16), linear.tobytes())
    file = write(tmp_path / "in" / "m.safetensors", tensors, None)
    for words in (
        ("dequantize", file),
        ("transcode", file, "--dialect", "modelopt"),
        ("quantize", file, "--format", "nvfp4"),
    ):
        refused = run(*words, "-o", tmp_path / "out", "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, "unmarked-layout")
    found = run("inspect", file, "--json").json["findings"]
    assert {"unmarked", "scale-layout"} <= {one["code"] for one in found}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_without_scales_is_values_for_every_command(dtype: str, tmp_path: Path) -> None:
    """A file that was cast; dequantize takes it, as inspect's words say."""
    kind = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[dtype]
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(kind)
    name = "double_blocks.0.img_mlp.0.weight"
    write_checkpoint(
        tmp_path / "m", {"cast.safetensors": {name: (dtype, (64, 64), values.tobytes())}}
    )
    (tmp_path / "m" / "config.json").unlink(missing_ok=True)
    source = tmp_path / "m" / "cast.safetensors"
    error = run("inspect", source, "--json").json["error"]
    assert (error["code"], dtype in error["message"]) == ("not-an-artifact", True)
    done("dequantize", source, "-o", tmp_path / "d", "--dtype", "fp32")
    _, _, data = read_folder(tmp_path / "d")[name]
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(64, 64), values.astype(np.float32))
    options = ("--format", "nvfp4", "--dialect", "comfy", "-o", tmp_path / "q")
    done("quantize", source, *options)
    done("verify", tmp_path / "q", "--source", source)
