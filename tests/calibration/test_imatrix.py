"""llama.cpp's importance matrices as the mean squares of inputs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
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
CALLS = struct.pack("<ii", 3, 64)  # of an entry of an old file, and its values
DENSE = {name.removesuffix(".weight"): each for name, each in model().items() if each.ndim > 1}
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
GATED = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
NUMBERED = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
Sums = dict[str, np.ndarray]


def sums_of(sizes: dict[str, tuple[int, int]]) -> Sums:
    """Sums of squares by llama.cpp's name, a row for each expert; unequal columns."""
    random = np.random.default_rng(1)
    return {
        name: np.exp(random.normal(0, 3, size)).astype(np.float32) for name, size in sizes.items()
    }


def write_gguf(path: Path, sums: Sums, unreached: str = "") -> Path:
    """As llama-imatrix writes it, by llama.cpp's own package; a third expert may lack tokens."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_type("imatrix")
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


def write_dat(path: Path, sums: Sums, unreached: str = "") -> Path:
    """As llama-imatrix --output-format dat writes it: means times the calls."""
    data = struct.pack("<i", len(sums))
    for name, each in sums.items():
        stored = f"{name}.weight".encode()
        data += struct.pack("<i", len(stored)) + stored + struct.pack("<ii", 3, each.size)
        data += (each / TOKENS * 3).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 1, 4) + b"text")
    return path


def rounded(source: Path, file: Path | None, out: Path, *options: str) -> dict[str, object]:
    words = () if file is None else ("--calibration", file)
    done("quantize", source, "--format", "nvfp4", *options, *words, "-o", out)
    made: dict[str, object] = {path.name: path.read_bytes() for path in out.glob("*.gguf")}
    return made or dict(read_folder(out))


def by_hand(path: Path, source: Path, squares: Sums) -> Path:
    """The same moments as a calibration file, by the safetensors package."""
    tensors = {}
    for module, each in squares.items():
        tensors[f"{module}.input_sq_mean"] = each.astype(np.float32)
        tensors[f"{module}.input_channel_amax"] = np.sqrt(each * 2).astype(np.float32)
    return write_calibration(path, open_source(str(source)), tensors)


@pytest.fixture
def dense(tmp_path: Path) -> tuple[Path, Sums]:
    sums = sums_of({name: (1, each.shape[1]) for name, each in DENSE.items() if "blk" in name})
    return write_donor(tmp_path / "m.gguf", model(), "F32"), sums


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_a_gguf_file_is_rounded_as_by_the_same_moments(
    dense: tuple[Path, Sums], write: Callable[..., Path], tmp_path: Path
) -> None:
    source, sums = dense
    squares = {name: each[0] / TOKENS for name, each in sums.items()}
    files = [write(tmp_path / "i", sums), by_hand(tmp_path / "same", source, squares), None]
    made, same, plain = (
        rounded(source, file, tmp_path / str(number), "--dialect", "gguf")
        for number, file in enumerate(files)
    )
    assert made == same != plain
    record = json.loads((tmp_path / "0" / "quantization_config.json").read_text())
    assert record["scale_rule"] == "importance"


@pytest.mark.parametrize("write", [write_gguf, write_dat])
@pytest.mark.parametrize(
    ("make", "part", "names"),
    [(make_qwen3_moe, "mlp", GATED), (make_mixtral, "block_sparse_moe", NUMBERED)],
)
def test_safetensors_are_found_by_their_names_in_llamacpp(
    make: Callable[[Path], Path],
    part: str,
    names: dict[str, str],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Experts have rows of their own; one without a token has the mean of its stack."""
    source = make(tmp_path / "m")
    stored = {name: shape for name, (_, shape, _) in read_folder(source).items()}
    modules: dict[str, tuple[str, int]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for name, (*_, columns) in stored.items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        if "experts" in parts:
            stem, number = f"blk.{parts[2]}.{names[parts[-1]]}", int(parts[-2])
            sizes[stem] = max(number + 1, sizes.get(stem, (0, 0))[0]), columns
        elif parts[-1] in NAMES:
            stem, number = f"blk.{parts[2]}.{NAMES[parts[-1]]}", 0
            sizes[stem] = 1, columns
            sizes[f"blk.{parts[2]}.ffn_gate_inp"] = 1, stored["model.embed_tokens.weight"][1]
        else:
            continue
        modules[module] = stem, number
    sums, unreached = sums_of(sizes), "blk.1.ffn_down_exps"
    matrix = write(tmp_path / "i", sums, unreached)
    squares = {module: sums[stem][number] / TOKENS for module, (stem, number) in modules.items()}
    if write is write_gguf:
        (lacking,) = (name for name, place in modules.items() if place == (unreached, 2))
        squares[lacking] = np.delete(sums[unreached].astype(np.float64), 2, 0).mean(0) / TOKENS
    same = by_hand(tmp_path / "same", source, squares)
    assert rounded(source, matrix, tmp_path / "a") == rounded(source, same, tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"blk.0.ffn_down": None}, "calibration-missing"),
        ({"blk.0.ffn_down": np.ones((1, 32), np.float32)}, "calibration-shape"),
        ({"blk.0.attn_q": np.full((1, 64), np.nan, np.float32)}, "calibration-values"),
        ({"blk.0.attn_q": -np.ones((1, 64), np.float32)}, "calibration-values"),
        ({"blk.0.attn_q": np.ones((2, 64), np.float32)}, "calibration-missing"),
        ({"blk.0.attn_q": np.ones((1, 0), np.float32)}, "calibration-file"),
        (lambda data: data[:60], "calibration-file"),
        (lambda data: struct.pack("<ii", 1, 40) + data[8:], "calibration-file"),
        (lambda data: struct.pack("<i", 14) + data[4:-12] + data[4:], "calibration-file"),
        (lambda data: data.replace(CALLS, struct.pack("<ii", 0, 64)), "calibration-values"),
        (None, "calibration-file"),
    ],
)
def test_what_does_not_fit_or_is_damaged_is_refused(
    dense: tuple[Path, Sums], change: object, code: str, tmp_path: Path
) -> None:
    source, sums = dense
    file = tmp_path / "i"
    if isinstance(change, dict):
        write_gguf(file, {k: v for k, v in (sums | change).items() if v is not None})
    elif callable(change):
        file.write_bytes(change(write_dat(file, sums).read_bytes()))
    else:
        file = source
    words = ("--format", "nvfp4", "--dialect", "gguf", "--calibration", file, "--json")
    assert run("quantize", source, *words, "-o", tmp_path / "q").json["error"]["code"] == code
    assert not (tmp_path / "q").exists()


def test_what_needs_more_than_squares_says_so(dense: tuple[Path, Sums], tmp_path: Path) -> None:
    source, sums = dense
    words = ("--format", "nvfp4", "--dialect", "gguf", "--calibration")
    words = (*words, write_gguf(tmp_path / "i", sums), "--json")
    error = run("quantize", source, *words, "--method", "gptq", "-o", tmp_path / "q").json["error"]
    assert error["code"] == "no-gram"
    done("quantize", source, *words, "--activations", "4", "-o", tmp_path / "a")
