"""llama.cpp's importance matrices as the mean squares of inputs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from calibrations import write_calibration
from checkpoints import done, read_folder, run
from gguf_donors import model, write_donor
from tiny_models import make_mixtral, make_qwen3_moe

from fp4convert.storage.open import open_source

TOKENS = 24


def inputs_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Sums of squares by llama.cpp's name, a row for each expert; unequal columns."""
    random = np.random.default_rng(1)
    return {
        name: np.exp(random.normal(0, 3, (shape[0] if len(shape) == 3 else 1, shape[-1]))).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, sums: dict[str, np.ndarray], unreached: str = "") -> Path:
    """As llama-imatrix writes it, by llama.cpp's own package; its third expert may lack tokens."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", TOKENS)
    for name, each in sums.items():
        counts = np.full((len(each), 1), TOKENS, np.float32)
        if name == unreached:
            counts[2] = 0
        writer.add_tensor(f"{name}.weight.in_sum2", np.where(counts, each, 0).astype(np.float32))
        writer.add_tensor(f"{name}.weight.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, sums: dict[str, np.ndarray], calls: int = 3) -> Path:
    """As llama-imatrix --output-format dat writes it: means times the calls."""
    data = struct.pack("<i", len(sums))
    for name, each in sums.items():
        stored = f"{name}.weight".encode()
        data += struct.pack("<i", len(stored)) + stored
        data += struct.pack("<ii", calls, each.size)
        data += (each / TOKENS * calls).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 1, 4) + b"text")
    return path


def by_hand(path: Path, source: Path, squares: dict[str, np.ndarray]) -> Path:
    """The same moments as a calibration file, by the safetensors package."""
    tensors = {}
    for module, each in squares.items():
        tensors[f"{module}.input_sq_mean"] = each.astype(np.float32)
        tensors[f"{module}.input_channel_amax"] = np.sqrt(each * 2).astype(np.float32)
    return write_calibration(path, open_source(str(source)), tensors)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.gguf")}


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_a_gguf_file_is_rounded_as_by_the_same_moments(write: object, tmp_path: Path) -> None:
    source = write_donor(tmp_path / "m.gguf", model(), "F32")
    shapes = {name.removesuffix(".weight"): each.shape for name, each in model().items()}
    sums = inputs_of({name: shape for name, shape in shapes.items() if name.startswith("blk")})
    sums = {name: each for name, each in sums.items() if len(shapes[name]) > 1}
    matrix = write(tmp_path / "imatrix", sums)  # type: ignore[operator]
    squares = {name: each[0] / TOKENS for name, each in sums.items()}
    same = by_hand(tmp_path / "same.safetensors", source, squares)
    options = ("--format", "nvfp4", "--dialect", "gguf", "--json")
    made = {}
    for name, file in {"matrix": matrix, "same": same, "none": None}.items():
        words = () if file is None else ("--calibration", file)
        done("quantize", source, *options, *words, "-o", tmp_path / name)
        made[name] = files_of(tmp_path / name)
    assert made["matrix"] == made["same"] != made["none"]
    record = json.loads((tmp_path / "matrix" / "quantization_config.json").read_text())
    assert record["scale_rule"] == "importance"


NAMES = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    "self_attn.o_proj": "attn_output",
}
EXPERTS = {
    "mlp": {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    "block_sparse_moe": {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}


@pytest.mark.parametrize("write", [write_gguf, write_dat])
@pytest.mark.parametrize(
    ("make", "part"), [(make_qwen3_moe, "mlp"), (make_mixtral, "block_sparse_moe")]
)
def test_safetensors_are_found_by_their_names_in_llamacpp(
    make: object, part: str, write: object, tmp_path: Path
) -> None:
    """Experts have rows of their own; one without a token has the mean of its stack."""
    source = make(tmp_path / "m")  # type: ignore[operator]
    config = json.loads((source / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    heads = config["num_attention_heads"] * (config.get("head_dim") or width // 4)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes |= {block + name: (1, width) for name in (*NAMES.values(), "ffn_gate_inp")}
        shapes |= {block + "attn_output": (1, heads)}
        for name in EXPERTS[part].values():
            shapes[block + name] = (experts, 1, inner if "down" in name else width)
    sums = inputs_of(shapes)
    unreached = "blk.1.ffn_down_exps" if write is write_gguf else ""
    words = (unreached,) if unreached else ()
    matrix = write(tmp_path / "imatrix", sums, *words)  # type: ignore[operator]
    squares = {}
    for layer in range(layers):
        above = f"model.layers.{layer}"
        for module, name in NAMES.items():
            squares[f"{above}.{module}"] = sums[f"blk.{layer}.{name}"][0] / TOKENS
        for module, name in EXPERTS[part].items():
            stem = f"blk.{layer}.{name}"
            for number, each in enumerate(sums[stem]):
                mean = each / TOKENS
                if stem == unreached and number == 2:
                    others = np.delete(sums[stem].astype(np.float64), 2, 0)
                    mean = others.sum(0) / (TOKENS * len(others))
                squares[f"{above}.{part}.experts.{number}.{module}"] = mean
    same = by_hand(tmp_path / "same.safetensors", source, squares)
    made = {}
    for name, file in {"matrix": matrix, "same": same}.items():
        options = ("--format", "nvfp4", "--calibration", file, "--json")
        done("quantize", source, *options, "-o", tmp_path / name)
        made[name] = read_folder(tmp_path / name)
    assert made["matrix"] == made["same"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"blk.0.ffn_down": None}, "calibration-missing"),
        ({"blk.0.ffn_down": np.ones((1, 32), np.float32)}, "calibration-shape"),
        ({"blk.0.attn_q": np.full((1, 64), np.nan, np.float32)}, "calibration-values"),
        ({"blk.0.attn_q": -np.ones((1, 64), np.float32)}, "calibration-values"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    change: dict[str, np.ndarray | None], code: str, tmp_path: Path
) -> None:
    source = write_donor(tmp_path / "m.gguf", model(), "F32")
    shapes = {name.removesuffix(".weight"): each.shape for name, each in model().items()}
    sums = {
        **inputs_of({name: shape for name, shape in shapes.items() if len(shape) > 1}),
        **change,
    }
    file = write_gguf(tmp_path / "i.gguf", {k: v for k, v in sums.items() if v is not None})
    words = ("--format", "nvfp4", "--dialect", "gguf", "--calibration", file, "--json")
    error = run("quantize", source, *words, "-o", tmp_path / "q").json["error"]
    assert error["code"] == code
    assert not (tmp_path / "q").exists()


def test_other_files_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    source = write_donor(tmp_path / "m.gguf", model(), "F32")
    sums = {"blk.0.attn_q": np.ones((1, 64), np.float32)}
    dat = write_dat(tmp_path / "i.dat", sums).read_bytes()
    cut, other = tmp_path / "cut.dat", tmp_path / "other.dat"
    cut.write_bytes(dat[:60])
    other.write_bytes(struct.pack("<ii", 1, 40) + dat[8:])
    for file in (cut, other, source):
        words = ("--format", "nvfp4", "--dialect", "gguf", "--calibration", file, "--json")
        error = run("quantize", source, *words, "-o", tmp_path / "q").json["error"]
        assert (error["code"], "importance matrix" in error["message"]) == (
            "calibration-file",
            True,
        )


def test_what_needs_more_than_squares_says_so(tmp_path: Path) -> None:
    source = write_donor(tmp_path / "m.gguf", model(), "F32")
    shapes = {name.removesuffix(".weight"): each.shape for name, each in model().items()}
    sums = inputs_of({name: shape for name, shape in shapes.items() if len(shape) > 1})
    file = write_gguf(tmp_path / "i.gguf", sums)
    words = ("--format", "nvfp4", "--dialect", "gguf", "--calibration", file, "--json")
    error = run("quantize", source, *words, "--method", "gptq", "-o", tmp_path / "q").json["error"]
    assert error["code"] == "no-gram"
    done("quantize", source, *words, "--activations", "4", "-o", tmp_path / "a")
