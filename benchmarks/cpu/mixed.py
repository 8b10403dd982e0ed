"""What artifacts of several formats cost beside plain bf16 of the same shapes: whole commands on
warm files in memory.

Processor seconds for a weight of `transcode` into the other dialect, and of `quantize` where it
rounds again, as ratios of plain bf16 -> NVFP4 by rule amax; start-up taken off, medians of pairs.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from cpu.sources import MEMORY, write
from harness.measure import SUPPORT, machine, results, table, verdict
from harness.processes import COMMAND, Cost, run, take_turns

sys.path.append(str(SUPPORT))
from mixing import Eight, write_mixed

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.target_forms import fp8_form
from fp4convert.numerics.formats import INT4
from fp4convert.recipes.recipe import Target

LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 2, 16, 2048, 1408, 16384
ATTENTION = {"q_proj": (4096, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048)} | {
    "o_proj": (2048, 4096)
}
EXPERT = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
KEPT = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
CONFIG = {"model_type": "qwen3_moe", "torch_dtype": "bfloat16"}
CT, MODELOPT = "compressed-tensors", "modelopt"
OTHER = {CT: MODELOPT, MODELOPT: CT}
RECIPE = """about = "{pattern} in {fmt}"
base = "default"
[[format]]
modules = ["{pattern}"]
format = "{fmt}"
"""
EIGHTS = {  # source: what of it has eight bits, and in which format; all else is NVFP4
    "NVFP4 experts, FP8 attention": ("*.self_attn.*", "fp8"),
    "MXFP8 experts, NVFP4 attention": ("*.experts.*", "mxfp8"),
}
INTEGERS = "int4 experts, FP8 attention"
PLAIN = ("bf16", f"quantize, {CT}")
ROUNDS, BAR = 5, 1.5
GROUP = 32  # columns that share a scale of int4


def shapes() -> dict[str, tuple[int, int]]:
    """The linear layers."""
    found = {}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        found |= {f"{place}.self_attn.{leaf}": shape for leaf, shape in ATTENTION.items()}
        for expert in range(EXPERTS):
            owner = f"{place}.mlp.experts.{expert}"
            found |= {f"{owner}.{leaf}": shape for leaf, shape in EXPERT.items()}
    return found


def weights() -> dict[str, np.ndarray]:
    """Normal numbers in bf16, cut from one pattern, each matrix from another place on."""
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    pattern = noise.astype(ml_dtypes.bfloat16)
    return {
        name: np.resize(np.roll(pattern, -7919 * number), shape)
        for number, (name, shape) in enumerate((shapes() | KEPT).items())
    }


def write_integers(folder: Path, matrices: dict[str, np.ndarray]) -> Path:
    """Experts of int4 under scales of 32, attention of FP8 under scales of rows."""
    form = fp8_form(Target("fp8", CT, activations=8), "row")
    made: dict[str, tuple[Form, Eight]] = {}
    for name in shapes():
        x, is_expert = matrices[name].astype(np.float32), ".experts." in name
        blocks = x.reshape(x.shape[0], -1, GROUP if is_expert else x.shape[1])
        scales = np.abs(blocks).max(2) / np.float32(7 if is_expert else 448)
        if is_expert:
            scales = scales.astype(ml_dtypes.bfloat16)
            q = (blocks / scales.astype(np.float32)[..., None]).reshape(x.shape)
            codes = (np.clip(np.rint(q), -8, 7) + 8).astype(np.uint8)
            codes = codes[:, ::2] | codes[:, 1::2] << 4
            own = Form(INT4, granularity=(1, GROUP), stored_scales="BF16")
        else:
            codes, own = (x / scales).astype(ml_dtypes.float8_e4m3fn), form
        made[name] = own, Eight(x.shape, codes.tobytes(), scales.tobytes())
    kept = {f"{name}.weight": ("BF16", KEPT[name], matrices[name].tobytes()) for name in KEPT}
    return write_mixed(folder, Target("fp8", CT, activations=8), made, kept, CONFIG)


def write_sources(root: Path) -> tuple[Path, dict[tuple[str, str], Path]]:
    """The plain checkpoint, and by what they hold and by dialect the others."""
    matrices = weights()
    stored = {f"{name}.weight": ("BF16", matrix) for name, matrix in matrices.items()}
    plain = write(root / "plain", CONFIG, stored)
    found = {}
    for name, (pattern, fmt) in EIGHTS.items():
        recipe = root / f"{fmt}.toml"
        recipe.write_text(RECIPE.format(pattern=pattern, fmt=fmt))
        for dialect in OTHER:
            out = root / f"{fmt}-{dialect}"
            words = ("--format", "nvfp4", "--recipe", recipe, "--scale-rule", "amax")
            run([COMMAND, "quantize", plain, *words, "--dialect", dialect, "-o", out, "-q"])
            found[name, dialect] = out
    found[INTEGERS, CT] = write_integers(root / "int4", matrices)
    return plain, found


def works_of(sources: dict[tuple[str, str], Path]) -> dict[tuple[str, str], tuple[object, ...]]:
    """The words of every command, by source and what it does."""
    works: dict[tuple[str, str], tuple[object, ...]] = {}
    for (name, dialect), source in sources.items():
        # modelopt has no int4: such a source stays in its dialect
        other = dialect if name == INTEGERS else OTHER[dialect]
        works[name, f"transcode, {dialect} to {other}"] = (
            *("transcode", source, "--dialect", other),
        )
        works[name, f"quantize, {dialect}"] = quantizing(source, dialect)
    return works


def quantizing(source: Path, dialect: str) -> tuple[object, ...]:
    options = ("--format", "nvfp4", "--scale-rule", "amax", "--device", "cpu")
    return ("quantize", source, "--dialect", dialect, *options)


def converted(out: Path, words: tuple[object, ...]) -> Cost:
    shutil.rmtree(out, ignore_errors=True)
    return run([COMMAND, *words, "-o", out, "-q"])


def rows_of(scratch: Path, rounds: int) -> list[list[str]]:
    """Every source and command beside the plain one, in turns."""
    plain, sources = write_sources(scratch)
    works, out = works_of(sources), scratch / "out"
    turns = {("", ""): lambda: run([COMMAND, "doctor", "--json"])}
    turns[PLAIN] = lambda: converted(out, quantizing(plain, CT))
    turns |= {key: lambda words=words: converted(out, words) for key, words in works.items()}
    done = take_turns(turns, rounds)
    idle, count = done.pop(("", "")), sum(math.prod(shape) for shape in shapes().values())
    net = {
        key: [
            (one.cpu_seconds - start.cpu_seconds, one.seconds - start.seconds)
            for one, start in zip(costs, idle, strict=True)
        ]
        for key, costs in done.items()
    }
    rows = []
    for key, costs in net.items():
        pairs = list(zip(costs, net[PLAIN], strict=True))
        cpu, wall = (statistics.median(a[at] / b[at] for a, b in pairs) for at in (0, 1))
        each = statistics.median(own for own, _ in costs) / count * 1e9
        judged = "" if key == PLAIN else verdict(cpu, BAR, is_floor=False)
        rows.append([*key, f"{each:.2f}", f"{wall:.2f}", f"{cpu:.2f}", judged])
    return rows


def main(arguments: list[str]) -> int:
    """Write mixed.md."""
    parser = argparse.ArgumentParser(prog="bench.py mixed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="pairs to measure")
    rounds = parser.parse_args(arguments).rounds
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        rows = rows_of(Path(scratch), rounds)
    linears = sum(math.prod(shape) for shape in shapes().values())
    kept = sum(math.prod(shape) for shape in KEPT.values())
    about = (
        "Written by `python benchmarks/bench.py mixed`. CPU-seconds of whole commands, all threads,"
        f" start-up taken off, files in memory, by rule amax; {linears / 1e6:.0f}M weights of"
        f" linear layers and {kept / 1e6:.0f}M that stay bf16 in every source, medians of {rounds}"
        " rounds in turn. Ratios are of the plain source in the same round. `transcode` rounds"
        " nothing; `quantize` takes NVFP4 blocks over and rounds what is not NVFP4."
        f" {machine()}."
    )
    headings = ["source", "command", "CPU-ns for a weight", "times the seconds"]
    page = table([*headings, "times the CPU s", "bar"], rows)
    page = f"# Sources of several formats\n\n{about}\n\n{page}\n"
    results("mixed", "md").write_text(page, encoding="utf-8")
    print(page)
    return 0
