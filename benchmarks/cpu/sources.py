"""What a stack of experts or an FP8 source costs beside plain bf16 matrices of the same weights:
whole commands, warm cache.

Seconds and processor seconds of `quantize` into memory-backed files, start-up taken off, as ratios
of the plain source per
element; medians of interleaved rounds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from harness.measure import median_ratio
from harness.processes import COMMAND, run
from harness.sections import Row, Section

EXPERTS, HIDDEN, INNER, ROUNDS, BLOCK = 16, 2880, 2880, 5, 128
MEMORY = Path("/dev/shm")
LAYER = "model.layers.0.mlp.experts"
BARS = {
    "stack [E, out, in]": 1.5,
    "stack [E, in, out], gate and up in turn": 1.5,
    "FP8, 128x128 blocks": 1.5,
}


def write(
    folder: Path, config: dict[str, object], tensors: dict[str, tuple[str, np.ndarray]]
) -> Path:
    """A checkpoint of one shard."""
    folder.mkdir()
    entries, end = {}, 0
    for name, (dtype, values) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": values.shape,
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            out.write(np.ascontiguousarray(values).tobytes())
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, **config}))
    return folder


def write_sources(root: Path) -> dict[str, Path]:
    """The same weights in four ways."""
    rng = np.random.default_rng(0)
    fused = (rng.standard_normal((EXPERTS, HIDDEN, 2 * INNER), np.float32) * 0.02).astype(
        ml_dtypes.bfloat16
    )
    down = (rng.standard_normal((EXPERTS, INNER, HIDDEN), np.float32) * 0.02).astype(
        ml_dtypes.bfloat16
    )
    plain = {}
    for expert in range(EXPERTS):
        matrices = {
            "gate_proj": fused[expert].T[0::2],
            "up_proj": fused[expert].T[1::2],
            "down_proj": down[expert].T,
        }
        plain |= {
            f"{LAYER}.{expert}.{leaf}.weight": np.ascontiguousarray(matrix)
            for leaf, matrix in matrices.items()
        }
    stacks = {f"{LAYER}.gate_up_proj": fused, f"{LAYER}.down_proj": down}
    turned = {name: np.ascontiguousarray(stack.swapaxes(1, 2)) for name, stack in stacks.items()}
    eight: dict[str, tuple[str, np.ndarray]] = {}
    for name, matrix in plain.items():
        codes, scales = as_fp8(matrix)
        eight |= {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}
    record = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    floats = {
        "plain": ("qwen3_moe", plain),
        "out_in": ("qwen3_5_moe", turned),
        "in_out": ("gpt_oss", stacks),
    }
    written = {
        name: write(
            root / name,
            {"model_type": kind},
            {key: ("BF16", values) for key, values in tensors.items()},
        )
        for name, (kind, tensors) in floats.items()
    }
    fp8 = write(root / "fp8", {"model_type": "qwen3_moe", "quantization_config": record}, eight)
    return dict(zip(("plain matrices", *BARS), (*written.values(), fp8), strict=True))


def as_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes and the scales of their blocks."""
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
    scales = np.abs(blocks).max((1, 3)) / 448
    codes = (
        (blocks / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn).reshape(padded.shape)
    )
    return codes[: matrix.shape[0], : matrix.shape[1]], scales.astype(np.float32)


def rows_of(fmt: str, sources: dict[str, Path], out: Path) -> list[Row]:
    """Every source but the plain one, beside that one."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(ROUNDS):
        idle = run([COMMAND, "doctor", "--json"])
        for name, source in sources.items():
            shutil.rmtree(out, ignore_errors=True)
            whole = run(
                [COMMAND, "quantize", source, "--format", fmt, "-o", out, "-q", "--device", "cpu"]
            )
            found[name].append((whole.seconds - idle.seconds, whole.cpu_seconds - idle.cpu_seconds))
    plain_seconds, plain_cpu = zip(*found.pop("plain matrices"), strict=True)
    rows = []
    for name, costs in found.items():
        taken, cpu = zip(*costs, strict=True)
        rows.append(
            Row(
                (fmt, name),
                (f"{median_ratio(taken, plain_seconds):.2f}",),
                median_ratio(cpu, plain_cpu),
                BARS[name],
            )
        )
    return rows


def sections(is_quick: bool) -> list[Section]:
    """Quick: NVFP4 alone."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        sources, out = write_sources(Path(scratch)), Path(scratch) / "out"
        rows = [
            row
            for fmt in (("nvfp4",) if is_quick else ("nvfp4", "mxfp4"))
            for row in rows_of(fmt, sources, out)
        ]
    about = (
        "What `quantize` costs for the same weights stored in another way, beside plain bf16 "
        "matrices; start-up taken off, warm"
        f" files in memory, {3 * EXPERTS * HIDDEN * INNER / 1e6:.0f}M weights, medians of "
        f"{ROUNDS} rounds in turn. An FP8 source"
        " has half the bytes: per byte of it, twice these figures."
    )
    return [
        Section(
            "Sources",
            about,
            ("format", "source", "times the seconds"),
            tuple(rows),
            "times the CPU s",
            is_floor=False,
        )
    ]
