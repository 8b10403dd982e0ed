"""What llama.cpp has no type for, carried into GGUF: FP8, MXFP8 and int4 become floats or Q8_0,
with the bytes of llama.cpp's own package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoints import LAYER, LLAMA, Outcome, done, run, write_llama
from gguf.quants import quantize
from gguf_donors import HEADS, NAMES, Arrays, llamas, model, permuted, write_donor
from mixing import Eight, write_mixed

from fp4convert.checkpoint.dialects.forms import Form, Granularity
from fp4convert.checkpoint.dialects.target_forms import fp8_form, module_form
from fp4convert.numerics.codec import quantize as nvfp4
from fp4convert.numerics.formats import INT4, MXFP8, NVFP4
from fp4convert.numerics.matrices import Quantized
from fp4convert.recipes.recipe import Target

MODULES = 7


def transcode(artifact: Path, donor: Path, output: Path, *options: object) -> Outcome:
    words = ("--dialect", "gguf", "--template", donor, "--json", *options)
    return run("transcode", artifact, "-o", output, *words)


def eight(x: np.ndarray, granularity: Granularity) -> tuple[Eight, np.ndarray]:
    """FP8 by the definition, under F32 scales: what is stored, and what it is worth."""
    whole: dict[object, tuple[int, int]] = {"tensor": x.shape, "row": (1, x.shape[1])}
    height, width = granularity if isinstance(granularity, tuple) else whole[granularity]
    edges = [np.arange(0, size, step) for size, step in zip(x.shape, (height, width), strict=True)]
    amax = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), edges[0], 0), edges[1], 1)
    scales = (amax / 448).astype(np.float32)
    spread = scales.repeat(height, 0)[: x.shape[0]].repeat(width, 1)[:, : x.shape[1]]
    codes = (x / spread).astype(ml_dtypes.float8_e4m3fn)
    return Eight(x.shape, codes.tobytes(), scales.tobytes()), codes.astype(np.float32) * spread


def mxfp8(x: np.ndarray) -> tuple[Eight, np.ndarray]:
    amax = np.abs(x.reshape(-1, 32)).max(1)
    scales = (2.0 ** np.ceil(np.log2(amax / 448))).astype(ml_dtypes.float8_e8m0fnu)
    spread = scales.astype(np.float32).repeat(32).reshape(x.shape)
    codes = (x / spread).astype(ml_dtypes.float8_e4m3fn)
    return Eight(x.shape, codes.tobytes(), scales.tobytes()), codes.astype(np.float32) * spread


def int4(x: np.ndarray) -> tuple[Eight, np.ndarray]:
    scales = (np.abs(x.reshape(-1, 32)).max(1) / 7).astype(np.float16)
    spread = scales.astype(np.float32).repeat(32).reshape(x.shape)
    codes = (np.clip(np.rint(x / spread), -8, 7) + 8).astype(np.uint8)
    values = codes.astype(np.float32) - 8
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).tobytes()
    return Eight(x.shape, packed, scales.tobytes()), values * spread


CT = "compressed-tensors"
FP8_TARGET, MXFP8_TARGET = Target("fp8", CT, activations=8), Target("mxfp8", CT, activations=8)
KINDS: dict[str, tuple[Form, Callable[[np.ndarray], tuple[Eight, np.ndarray]]]] = {
    "self_attn.q_proj": (fp8_form(FP8_TARGET, "row"), lambda x: eight(x, "row")),
    "self_attn.k_proj": (fp8_form(FP8_TARGET, "tensor"), lambda x: eight(x, "tensor")),
    "self_attn.v_proj": (fp8_form(FP8_TARGET, (128, 128)), lambda x: eight(x, (128, 128))),
    "self_attn.o_proj": (fp8_form(MXFP8_TARGET, (1, 32), "U8", MXFP8), mxfp8),
    "mlp.gate_proj": (Form(INT4, granularity=(1, 32), stored_scales="F16"), int4),
}
NARROW = {"fp16": ("F16", np.float16), "bf16": ("BF16", ml_dtypes.bfloat16)}
EMBEDDING, HEAD, ROUTER = "token_embd.weight", "output.weight", "blk.0.ffn_gate_inp.weight"
NORM = "blk.0.attn_norm.weight"


def write_kinds(folder: Path, arrays: Arrays) -> tuple[Path, Arrays]:
    """A matrix of each kind beside NVFP4: the artifact, and what llama.cpp should hold."""
    matrices: dict[str, tuple[Form, Quantized | Eight]] = {}
    expected: Arrays = {}
    for leaf, (form, encode) in KINDS.items():
        name = f"{NAMES[f'{LAYER}.{leaf}']}.weight"
        stored, values = encode(arrays[name])
        matrices[f"{LAYER}.{leaf}"] = form, stored
        expected[name] = permuted(values, HEADS[name]) if name in HEADS else values
    target = Target("nvfp4", CT)
    for leaf in ("up_proj", "down_proj"):
        x = arrays[f"{NAMES[f'{LAYER}.mlp.{leaf}']}.weight"]
        matrices[f"{LAYER}.mlp.{leaf}"] = module_form(target, "nvfp4"), nvfp4(x, NVFP4, "amax")
    norm = arrays[NORM].astype(ml_dtypes.bfloat16)
    kept = {f"{LAYER}.input_layernorm.weight": ("BF16", norm.shape, norm.tobytes())}
    return write_mixed(folder, target, matrices, kept, LLAMA), expected


def kept_findings(artifact: Path, donor: Path) -> list[str]:
    """Name what verify finds of tensors that stayed."""
    found = run("verify", artifact, "--source", donor, "--json").json["findings"]
    return [each["tensor"] for each in found if each["code"].startswith("kept-")]


@pytest.mark.parametrize("word", [None, "bf16", "fp16", "q8_0"])
def test_what_llama_cpp_has_no_type_for_becomes_what_is_asked_for(
    tmp_path: Path, word: str | None
) -> None:
    """FP8 by row, matrix and block, MXFP8 and int4: from their float32 values, as llama.cpp's own
    package and ml_dtypes round; matrices that stay become it, too. Told, counted and recorded.
    """
    arrays = model()
    artifact, expected = write_kinds(tmp_path / "made", arrays)
    donor = write_donor(tmp_path / "donor.gguf", llamas(arrays), "F32")
    options = ("--keep-dtype", word) if word else ()
    outcome = transcode(artifact, donor, tmp_path / "out", *options)
    assert outcome.code == 0, outcome.err
    stored = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "donor.gguf").tensors}
    expected |= {name: arrays[name] for name in (EMBEDDING, HEAD)}
    for name, values in expected.items():
        if word == "q8_0":
            found, data = "Q8_0", quantize(values, gguf.GGMLQuantizationType.Q8_0)
        else:
            found, dtype = NARROW[word] if word else ("F32", np.float32)
            data = values.astype(dtype)
        assert stored[name].tensor_type.name == found, name
        assert stored[name].data.tobytes() == data.tobytes(), name
    told, key = outcome.json["carried"], "q8_0" if word == "q8_0" else "floats"
    assert (told["modules"], told["bit_for_bit"] + len(told["rounded"])) == (MODULES, 2)
    assert {name: told.get(name, 0) for name in ("floats", "q8_0")} == {"floats": 0, "q8_0": 0} | {
        key: len(KINDS)
    }
    texts = " ".join(outcome.json["warnings"])
    for kind in ("fp8 row", "fp8 tensor", "fp8 128x128", "mxfp8", "int4 32"):
        assert f"1 matrices become {word or 'fp32'}, the first" in texts
        assert f"the dialect has no {kind}" in texts
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert record.get("keep_dtype") == word
    assert len(record["decoded"]) == len(KINDS)
    assert kept_findings(tmp_path / "out", donor) == []
    first, data = stored[record["decoded"][0]], tmp_path / "out" / "donor.gguf"
    whole = bytearray(data.read_bytes())
    whole[first.data_offset : first.data_offset + first.n_bytes] = bytes(int(first.n_bytes))
    data.write_bytes(whole)
    assert kept_findings(tmp_path / "out", donor) == [record["decoded"][0]]


@pytest.mark.parametrize("command", [("transcode", "--dialect", "modelopt"), ("dequantize",)])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A NaN among FP8's would make a whole row NaN, without a word."""
    x = model()["blk.0.attn_q.weight"]
    stored, _ = eight(x, "tensor")
    matrices: dict[str, tuple[Form, Quantized | Eight]] = {
        f"{LAYER}.self_attn.q_proj": (
            fp8_form(FP8_TARGET, "tensor"),
            Eight(x.shape, stored[1], np.float32(np.nan).tobytes()),
        )
    }
    target = Target("nvfp4", CT)
    matrices[f"{LAYER}.mlp.down_proj"] = module_form(target, "nvfp4"), nvfp4(x, NVFP4, "amax")
    artifact = write_mixed(tmp_path / "made", target, matrices, {}, LLAMA)
    outcome = run(command[0], artifact, "-o", tmp_path / "out", *command[1:], "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "scale-not-finite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("change", "is_fit"), [(0.0, True), (1.0, True), (0.2, False)])
def test_norms_are_those_of_the_gguf_file(tmp_path: Path, change: float, is_fit: bool) -> None:
    """Its own are kept: others, as folds leave them, would not fit; Gemma's are 1 more."""
    arrays = model()
    artifact, _ = write_kinds(tmp_path / "made", arrays)
    donor = write_donor(tmp_path / "d.gguf", llamas({**arrays, NORM: arrays[NORM] + change}), "F32")
    outcome = transcode(artifact, donor, tmp_path / "out")
    assert outcome.code == (0 if is_fit else 2)
    if not is_fit:
        assert outcome.json["error"]["code"] == "template-differs"
        assert outcome.json["error"]["tensor"] == f"{LAYER}.input_layernorm.weight"
        assert not (tmp_path / "out").exists()


def test_what_llama_cpp_reads_as_floats_alone_is_not_q8_0(tmp_path: Path) -> None:
    """A router of FP8, and a matrix whose rows are no whole blocks of 32."""
    arrays = model()
    random = np.random.default_rng(5)
    arrays[ROUTER] = random.normal(size=(4, 64)).astype(np.float32)
    arrays["blk.0.attn_output.weight"] = random.normal(size=(64, 80)).astype(np.float32)
    donor = write_donor(tmp_path / "donor.gguf", arrays, "F16")
    form = fp8_form(FP8_TARGET, "row")
    names = {f"{LAYER}.mlp.gate": ROUTER, f"{LAYER}.self_attn.o_proj": "blk.0.attn_output.weight"}
    found = {module: eight(arrays[name], "row") for module, name in names.items()}
    matrices: dict[str, tuple[Form, Quantized | Eight]] = {
        module: (form, stored) for module, (stored, _) in found.items()
    }
    target = Target("nvfp4", CT)
    x = arrays["blk.0.ffn_down.weight"]
    matrices[f"{LAYER}.mlp.down_proj"] = module_form(target, "nvfp4"), nvfp4(x, NVFP4, "amax")
    artifact = write_mixed(tmp_path / "made", target, matrices, {}, LLAMA)
    outcome = transcode(artifact, donor, tmp_path / "out", "--keep-dtype", "q8_0")
    assert outcome.code == 0, outcome.err
    stored = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "donor.gguf").tensors}
    for module, name in names.items():
        assert stored[name].tensor_type.name == "BF16"
        expected = found[module][1].astype(ml_dtypes.bfloat16).tobytes()
        assert stored[name].data.tobytes() == expected
    assert stored["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"
    assert outcome.json["carried"]["floats"] == 2
    assert "q8_0" not in outcome.json["carried"]


def test_types_that_change_nothing_or_are_not_there_are_refused(tmp_path: Path) -> None:
    source, made = write_llama(tmp_path / "source"), tmp_path / "nvfp4"
    done("quantize", source, "--format", "nvfp4", "-o", made, "-q")
    for dialect, word, code in (
        ("modelopt", "q8_0", "unknown-dtype"),
        ("modelopt", "bf16", "idle-option"),
    ):
        words = ("--dialect", dialect, "--keep-dtype", word, "-o", tmp_path / "q", "--json")
        refused = run("transcode", made, *words)
        assert (refused.code, refused.json["error"]["code"]) == (2, code)
        assert not (tmp_path / "q").exists()
