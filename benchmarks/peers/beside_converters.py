"""Whole converters of other packages beside ours: the same checkpoint, a process each, start-up included, warm.

    python converters.py [--gigabytes G] [--pairs N] [--limit SECONDS]

`--limit` is for each package: no pair begins after it, and a run that alone takes LONGEST times that is ended, and told so.
mlx_lm.convert and Model Optimizer run beside fp4convert; llm-compressor in the environment that make bench-peers makes.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conversion import convert, scratch_folder
from disk import files_of, make_warm
from llamas import make_checkpoint
from measure import ROOT
from processes import Cost, FailedError, TimeIsUpError, median_of, ratio_of, run
from sections import Row, Section

GIGABYTES, PAIRS, LIMIT = 4.0, 5, 200.0
LONGEST = 4  # times the limit, for one run
BAR = 100  # times as fast as each
SMALLEST, LARGEST = 0.25, 0.45  # of the source's bytes: what an artifact of four bits has


def mlx_lm(source: str, output: str) -> None:
    from mlx_lm import convert

    convert(source, output, quantize=True, q_mode="nvfp4", q_bits=4, q_group_size=16)


def modelopt(source: str, output: str) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = mtq.quantize(model, mtq.W4A16_NVFP4_CFG)
    export_hf_checkpoint(model, export_dir=output)


def llmcompressor(source: str, output: str) -> None:
    import torch
    from llmcompressor import model_free_ptq

    ignored = ["lm_head", "model.embed_tokens", "re:.*norm"]
    model_free_ptq(source, output, scheme="NVFP4A16", ignore=ignored, max_workers=torch.get_num_threads(), device="cpu")


@dataclass(frozen=True, slots=True)
class Converter:
    """convert runs in the environment of `python`, and needs `module` there; `install` gets it."""

    name: str
    module: str
    convert: Callable[[str, str], None]
    python: Path
    install: str


HERE, ELSEWHERE = Path(sys.executable), ROOT / ".venv-peers" / "bin" / "python"
CONVERTERS = (
    Converter("mlx_lm.convert", "mlx_lm", mlx_lm, HERE, "pip install '.[test]'"),
    Converter("Model Optimizer: mtq.quantize, export_hf_checkpoint", "modelopt", modelopt, HERE, "pip install '.[test]'"),
    Converter("llm-compressor: model_free_ptq", "llmcompressor", llmcompressor, ELSEWHERE, "make bench-peers"),
)


def version_of(converter: Converter) -> str | None:
    """Its version; None where it is not installed."""
    code = "import importlib.metadata as m, importlib.util as u, sys\n"
    code += "name = sys.argv[1]\nassert u.find_spec(name)\nprint(m.version(m.packages_distributions()[name][0]))"
    words = [converter.python, "-c", code, converter.module]
    if not converter.python.exists():
        return None
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else None


def sections(is_quick: bool, gigabytes: float = GIGABYTES, pairs: int = PAIRS, limit: float = LIMIT) -> list[Section]:
    """Quick: nothing, since the others are slow."""
    if is_quick:
        return []
    with scratch_folder() as scratch:
        source = scratch / "source"
        make_checkpoint(source, gigabytes)
        nbytes = sum(path.stat().st_size for path in files_of(source))
        found = [_beside(converter, source, scratch, pairs, limit) for converter in CONVERTERS]
    about = (
        f"{nbytes / 1e9:.2f} GB of bf16 to NVFP4, weights alone, on the CPU, warm, with start-up; ours by rule amax. Medians of"
        f" as many pairs as begin in {limit:.0f} s, {pairs} at most. Memory is RssAnon, looked at every few milliseconds."
    )
    headings = ("converter", "pairs", "its s", "ours s", "its CPU-s", "ours CPU-s", "its peak MB", "ours MB")
    return [Section("Beside other converters", about, headings, tuple(found), "times as fast")]


def _beside(converter: Converter, source: Path, scratch: Path, pairs: int, limit: float) -> Row:
    """The row of one; without a ratio, why there is none."""
    version = version_of(converter)
    if version is None:
        return _empty(converter.name, f"not installed: {converter.install}")
    name = f"{converter.name} {version}"
    ours: list[Cost] = []
    theirs: list[Cost] = []
    begun = time.monotonic()
    while len(theirs) < pairs and time.monotonic() - begun < limit:
        make_warm(source)
        ours.append(convert(source, scratch / "output", "amax", is_watched=True))
        make_warm(source)
        try:
            theirs.append(_run(converter, source, scratch / "other", LONGEST * limit))
        except TimeIsUpError as error:
            if not theirs:
                return _empty(
                    name, f"{error}, ours {ours[0].seconds:.2f} s: more than {LONGEST * limit / ours[0].seconds:.0f} times"
                )
            break
        except FailedError as error:
            return _empty(name, f"failed: {(str(error).strip() or 'said nothing').splitlines()[-1]}")
    ours = ours[: len(theirs)]
    cells = [f"{median_of(each):.2f}" for each in (theirs, ours)]
    cells += [f"{median_of(each, 'cpu_seconds'):.1f}" for each in (theirs, ours)]
    cells += [f"{median_of(each, 'anonymous_nbytes') / 1e6:,.0f}" for each in (theirs, ours)]
    return Row((name,), (str(len(theirs)), *cells), ratio_of(theirs, ours), BAR)


def _empty(name: str, why: str) -> Row:
    return Row((name,), (why, *[""] * 6))


def _run(converter: Converter, source: Path, output: Path, limit: float) -> Cost:
    """What it takes; SystemExit where what it wrote is no artifact of four bits."""
    shutil.rmtree(output, ignore_errors=True)
    index = CONVERTERS.index(converter)
    cost = run([converter.python, __file__, "--convert", index, source, output], is_watched=True, limit=limit)
    share = sum(path.stat().st_size for path in files_of(output)) / sum(path.stat().st_size for path in files_of(source))
    shutil.rmtree(output)
    if not SMALLEST < share < LARGEST:
        raise SystemExit(f"{converter.name} wrote {share:.2f} of the source's bytes; expected {SMALLEST} to {LARGEST}")
    return cost


def be_alone() -> None:
    """Take no more memory than there is, and import nothing from this folder: transformers looks for a package `kernels`."""
    sys.path.remove(str(Path(__file__).parent))
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    most = int(available.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.convert:
        index, source, output = asked.convert
        be_alone()
        CONVERTERS[int(index)].convert(source, output)
    else:
        print(sections(False, asked.gigabytes, asked.pairs, asked.limit)[0].markdown())


if __name__ == "__main__":
    main()
