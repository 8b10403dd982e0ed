"""GGUF's own types of blocks: Q8_0 that is written, and what is read, as llama.cpp's own Python
package has them.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoints import done, run, write_llama
from gguf.quants import dequantize, quantize
from gguf_donors import Arrays, model, write_donor

from fp4convert.storage.gguf import encode_q8_0

MODULES = 7
WIDE = 256  # columns of a block of Q4_K and its kin
EMBEDDING, HEAD, NORM = "token_embd.weight", "output.weight", "blk.0.attn_norm.weight"
ROUTER = "blk.0.ffn_gate_inp.weight"
READ = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"),
)


def read(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {each.name: each for each in gguf.GGUFReader(path).tensors}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return dequantize(tensor.data, tensor.tensor_type)


def bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def q8_0(array: np.ndarray) -> bytes:
    return quantize(array, gguf.GGMLQuantizationType.Q8_0).tobytes()


def more() -> Arrays:
    """A router, and a stack of experts whose columns NVFP4 does not divide."""
    random = np.random.default_rng(3)
    shapes = {ROUTER: (4, 64), "blk.0.ffn_up_exps.weight": (2, 8, 96)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def donors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("donors")
    arrays = {**model(), **more()}
    return {
        kind: write_donor(folder / f"{kind}.gguf", arrays, kind, kinds={ROUTER: "F32"})
        for kind in ("F32", "BF16", "F16")
    }


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_what_stays_becomes_q8_0_byte_for_byte(
    donors: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Norms and routers stay floats; four-bit modules are as without."""
    options = ("--format", "nvfp4", "--dialect", "gguf", "--json")
    words = (*options, "--keep-dtype", "q8_0")
    plan = run("quantize", donors[kind], *words, "--dry-run").json
    done("quantize", donors[kind], *words, "-o", tmp_path / "q")
    done("quantize", donors[kind], *options, "-o", tmp_path / "plain")
    first, made, plain = (
        read(path)
        for path in (donors[kind], *(tmp_path / name / f"{kind}.gguf" for name in ("q", "plain")))
    )
    for name in (EMBEDDING, HEAD, "blk.0.ffn_up_exps.weight"):
        assert made[name].tensor_type.name == "Q8_0"
        assert made[name].data.tobytes() == q8_0(values(first[name]))
        assert made[name].shape.tolist() == first[name].shape.tolist()
        (row,) = (row for row in plan["tensors"] if row["name"] == name)
        word = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[kind]
        assert row["reason"].endswith(f"; {word} becomes q8_0")
        assert row["output_bytes"] == made[name].n_bytes
        del made[name], plain[name]
    assert made.keys() == plain.keys()
    assert {NORM, ROUTER} < made.keys()
    for name, tensor in made.items():
        assert tensor.tensor_type == plain[name].tensor_type
        assert tensor.data.tobytes() == plain[name].data.tobytes()
    record = json.loads((tmp_path / "q" / "quantization_config.json").read_text())
    assert record["keep_dtype"] == "q8_0"


# Of two dimensions; llama.cpp's converter writes each as F32 whatever --outtype says
# (conversion/base.py, prepare_tensors).
OF_FLOATS = {
    **dict.fromkeys(
        ["blk.0.ffn_up_exps.bias", "blk.0.ffn_gate_exps.bias", "blk.0.ssm_a", "blk.0.ssm_d"],
        (4, 64),
    ),
    **{"blk.0.ssm_conv1d.weight": (64, 32), "blk.0.ssm_norm.weight": (2, 64)},
    **{"blk.0.shortconv.conv.weight": (64, 32), "blk.0.time_mix_w0.weight": (2, 64)},
    **{"position_embd.weight": (8, 64), "blk.0.ssm_dt.bias": (2, 64)},
}


@pytest.mark.parametrize("word", ["q8_0", "bf16", "fp16"])
@pytest.mark.parametrize("way", ["quantize", "transcode"])
def test_what_llamacpp_reads_as_floats_alone_stays(way: str, word: str, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    odd = {name: random.normal(size=shape).astype(np.float32) for name, shape in OF_FLOATS.items()}
    source = write_donor(tmp_path / "m.gguf", {**model(), **odd}, "F32")
    words = ("--dialect", "gguf", "--keep-dtype", word, "-o", tmp_path / "q")
    if way == "quantize":
        done("quantize", source, "--format", "mxfp4", *words)
    else:
        made = ("--format", "mxfp4", "-o", tmp_path / "made")
        done("quantize", write_llama(tmp_path / "llama"), *made)
        done("transcode", tmp_path / "made", "--template", source, *words)
    first, after = read(source), read(tmp_path / "q" / "m.gguf")
    for name in OF_FLOATS:
        assert after[name].tensor_type.name == "F32", name
        assert after[name].data.tobytes() == first[name].data.tobytes()
    narrow = {"q8_0": "Q8_0", "bf16": "BF16", "fp16": "F16"}[word]
    assert {after[name].tensor_type.name for name in (EMBEDDING, HEAD)} == {narrow}


def test_matrices_around_a_state_are_quantized(tmp_path: Path) -> None:
    """As by llama.cpp itself (src/llama-quant.cpp); what is small stays, too."""
    kinds = {"ssm_in": "MXFP4", "ssm_out": "MXFP4", "ssm_x": "F32", "ssm_dt": "F32"}
    kinds |= {"ssm_ba": "F32", "ssm_conv1d": "F32"}
    states = {f"blk.0.{name}.weight": np.ones((64, 64), np.float32) for name in kinds}
    source = write_donor(tmp_path / "m.gguf", {**model(), **states}, "F32")
    done("quantize", source, "--format", "mxfp4", "--dialect", "gguf", "-o", tmp_path / "q")
    after = read(tmp_path / "q" / "m.gguf")
    found = {name: after[f"blk.0.{name}.weight"].tensor_type.name for name in kinds}
    assert found == kinds


def test_verify_compares_what_became_q8_0(donors: dict[str, Path], tmp_path: Path) -> None:
    words = ("--format", "mxfp4", "--dialect", "gguf", "--keep-dtype", "q8_0")
    done("quantize", donors["BF16"], *words, "-o", tmp_path / "q")
    done("verify", tmp_path / "q", "--source", donors["BF16"])
    path = tmp_path / "q" / "BF16.gguf"
    begin = read(path)[EMBEDDING].data_offset
    data = bytearray(path.read_bytes())
    data[begin + 5] ^= 1
    path.write_bytes(data)
    found = run("verify", tmp_path / "q", "--source", donors["BF16"], "--json").json["findings"]
    assert ("kept-differs", EMBEDDING) in [(each["code"], each["tensor"]) for each in found]


def test_q8_0_turns_back_into_floats(donors: dict[str, Path], tmp_path: Path) -> None:
    words = ("--format", "mxfp4", "--dialect", "gguf", "--keep-dtype", "q8_0")
    done("quantize", donors["BF16"], *words, "-o", tmp_path / "q")
    done("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "fp32")
    before, after = read(tmp_path / "q" / "BF16.gguf"), read(tmp_path / "d" / "BF16.gguf")
    assert {each.tensor_type.name for each in after.values()} == {"F32"}
    for name in (EMBEDDING, HEAD, "blk.0.attn_q.weight"):
        assert np.array_equal(values(after[name]), values(before[name]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the package's, where scales are subnormal
def test_q8_0_is_the_packages_byte_for_byte() -> None:
    """Halves and their neighbours, zeros of both signs, every magnitude down to the subnormal."""
    random = np.random.default_rng(2)
    scales = 2.0 ** random.integers(-20, 10, (4096, 1))
    halves = (random.integers(-254, 255, (4096, 32)) / 2).astype(np.float32)
    halves[:, 0] = 127  # so that a code is worth a power of two
    below, above = (np.nextafter(halves, halves * np.float32(way)) for way in (0, 2))
    below[:, 0] = above[:, 0] = 127
    found = [(each * scales).astype(np.float32) for each in (halves, below, above)]
    found += [np.zeros((1, 32), np.float32), -np.zeros((1, 32), np.float32)]
    normal = random.standard_normal((512, 32))
    found += [(normal * 10.0**power).astype(np.float32) for power in range(-45, 6)]
    for x in found:
        expected = quantize(x, gguf.GGMLQuantizationType.Q8_0)
        assert bytes(encode_q8_0(x.reshape(-1))) == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, 1e8])
def test_what_q8_0_cannot_say_is_refused(tmp_path: Path, bad: float) -> None:
    arrays = model()
    arrays[EMBEDDING][3, 5] = bad
    donor = write_donor(tmp_path / "donor.gguf", arrays, "F32")
    words = ("--format", "mxfp4", "--dialect", "gguf", "--keep-dtype", "q8_0", "--json")
    outcome = run("quantize", donor, *words, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "q8-overflow")
    assert outcome.json["error"]["tensor"] == EMBEDDING


def test_other_dialects_have_no_q8_0(tmp_path: Path) -> None:
    words = ("--format", "mxfp4", "--keep-dtype", "q8_0", "--json")
    outcome = run("quantize", write_llama(tmp_path / "m"), *words, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "unknown-dtype")
    assert "gguf" in outcome.json["error"]["message"]
    assert not (tmp_path / "q").exists()


def blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of that type: the package's own, or random ones whose fp16 numbers are small."""
    stored = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(11)
    if not kind.endswith("_K") and not kind.startswith("IQ"):
        return quantize(random.normal(size=shape).astype(np.float32), stored)
    size, nbytes = gguf.GGML_QUANT_SIZES[stored]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), np.uint8)
    scale = np.frombuffer(np.float16([0.01, 0.02]).tobytes(), np.uint8)
    ends = {"Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q6_K": slice(208, 210)}
    place = ends.get(kind, slice(0, 4))
    data[..., place] = scale[: place.stop - place.start]
    return data.reshape(*shape[:-1], -1)


def write_packed(path: Path, kind: str) -> Path:
    """Every matrix of that type, and one stack of experts."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    stored = gguf.GGMLQuantizationType[kind]
    shapes = {EMBEDDING: (40, WIDE), "blk.0.attn_q.weight": (64, WIDE)}
    shapes |= {"blk.0.ffn_up_exps.weight": (3, 64, WIDE)}
    for name, shape in shapes.items():
        writer.add_tensor(name, blocks(kind, shape), raw_dtype=stored)
    writer.add_tensor(NORM, np.ones(WIDE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", READ)
def test_sources_of_that_type_are_turned_back(tmp_path: Path, kind: str) -> None:
    source = write_packed(tmp_path / "m.gguf", kind)
    done("dequantize", source, "-o", tmp_path / "d", "--dtype", "fp32")
    before, after = read(source), read(tmp_path / "d" / "m.gguf")
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].tensor_type.name == "F32"
        assert after[name].shape.tolist() == tensor.shape.tolist()
        assert np.array_equal(values(after[name]), values(tensor))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", READ)
@pytest.mark.sweep(4)
def test_sources_of_that_type_are_quantized_as_their_values(
    tmp_path: Path, kind: str, fmt: str
) -> None:
    """The blocks are those of the same values in float32; what stays keeps its type."""
    source = write_packed(tmp_path / "m.gguf", kind)
    done("dequantize", source, "-o", tmp_path / "d", "--dtype", "fp32")
    options = ("--format", fmt, "--dialect", "gguf")
    outcome = done("quantize", source, *options, "-o", tmp_path / "q")
    assert f"4 modules are {kind.lower()} and rounded again to {fmt}" in outcome.err
    done("quantize", tmp_path / "d", *options, "-o", tmp_path / "e")
    ours, other = (read(tmp_path / name / "m.gguf") for name in ("q", "e"))
    made = {name for name, each in ours.items() if each.tensor_type.name == fmt.upper()}
    assert made == {"blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"}
    for name in made:
        assert ours[name].data.tobytes() == other[name].data.tobytes()
    assert ours[EMBEDDING].tensor_type.name == kind
    assert ours[EMBEDDING].data.tobytes() == read(source)[EMBEDDING].data.tobytes()
    done("verify", tmp_path / "q", "--source", source)


def test_a_type_that_is_not_read_is_told_with_all_that_are(tmp_path: Path) -> None:
    source = write_donor(tmp_path / "m.gguf", model(), "Q8_1")
    words = ("quantize", source, "--format", "nvfp4", "--dialect", "gguf", "--dry-run", "--json")
    told, _, listed = run(*words).json["error"]["message"].partition("Q8_1, not one of ")
    assert told
    for kind in ("BF16", "F16", "F32", *READ):
        assert kind in listed


def test_a_source_of_several_types_is_analyzed(tmp_path: Path) -> None:
    source = write_packed(tmp_path / "m.gguf", "Q6_K")
    done("analyze", source, "--json")
