"""Planning a checkpoint of a trillion parameters in 100,000 tensors and 400 shards: seconds and
peak memory.

The names are those of DeepSeek-V3 and Kimi-K2; the files are headers and holes, which take no disk.
Everything is measured in
a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.measure import BENCHMARKS, SUPPORT, verdict
from harness.processes import COMMAND, clean_environment
from harness.sections import Row, Section

HIDDEN, EXPERT, HEADS, VOCABULARY = 7168, 1408, 64, 163840
LAYERS, EXPERTS, SHARDS = 86, 384, 400
ROUNDS = 5
REPOSITORY = "org/trillion"
BAR_CPU_SECONDS, BAR_MEGABYTES = 5, 400  # of a whole dry run, from a disk and from a Hub
NO_ROOM = "error[disk-full]"
CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
}
ATTENTION = {
    **{
        "q_a_proj": (1536, HIDDEN),
        "q_b_proj": (192 * HEADS, 1536),
        "kv_a_proj_with_mqa": (576, HIDDEN),
    },
    **{
        "kv_b_proj": (256 * HEADS, 512),
        "o_proj": (HIDDEN, 128 * HEADS),
        "q_a_layernorm": (1536,),
        "kv_a_layernorm": (512,),
    },
}
MLP = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}


def tensors(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the shards."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in (f"model.layers.{number}" for number in range(layers)):
        yield from (
            (f"{layer}.self_attn.{leaf}.weight", shape) for leaf, shape in ATTENTION.items()
        )
        yield f"{layer}.mlp.gate.weight", (experts, HIDDEN)
        yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,)
        for module in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
            yield from (
                (f"{layer}.mlp.{module}.{leaf}.weight", shape) for leaf, shape in MLP.items()
            )
        yield from (
            (f"{layer}.{leaf}.weight", (HIDDEN,))
            for leaf in ("input_layernorm", "post_attention_layernorm")
        )
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_checkpoint(
    folder: Path, layers: int = LAYERS, experts: int = EXPERTS, shards: int = SHARDS
) -> int:
    """Write a bf16 checkpoint of holes, in shards of equal size;
    return the number of its tensors.
    """
    listed = list(tensors(layers, experts))
    total = sum(2 * math.prod(shape) for _, shape in listed)
    weight_map: dict[str, str] = {}
    entries: dict[str, object] = {}
    end = written = number = 0
    for name, shape in listed:
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        if (written + end) * shards >= total * (number + 1):
            number += 1
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            weight_map |= dict.fromkeys(entries, file)
            write_hole(folder / file, entries, end)
            entries, end, written = {}, 0, written + end
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return len(listed)


def write_hole(path: Path, entries: dict[str, object], nbytes: int) -> None:
    """A shard of that header whose data are one hole."""
    text = json.dumps(entries).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + nbytes)


class Cost(NamedTuple):
    """What a stage took: seconds that passed, seconds of a processor, and the peak memory of its
    process until then in MB.
    """

    seconds: float
    cpu_seconds: float
    megabytes: float


def measure_stages(folder: str) -> dict[str, Cost]:
    """The cost of each stage; run in a process of its own."""
    from fp4convert.cli import screen
    from fp4convert.cli.draw_plan import draw_plan
    from fp4convert.conversion.artifact_job import artifact_job
    from fp4convert.conversion.dry_run import describe_plan
    from fp4convert.conversion.quantize import prepare_quantize
    from fp4convert.conversion.request import take_apart
    from fp4convert.execution.settings import Settings
    from fp4convert.options.writing import QuantizeOptions
    from fp4convert.storage.open import open_source

    found = {}
    begun = time.perf_counter(), time.process_time()

    def end(name: str) -> None:
        nonlocal begun
        ended = time.perf_counter(), time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        found[name] = Cost(ended[0] - begun[0], ended[1] - begun[1], peak)
        begun = time.perf_counter(), time.process_time()

    source = open_source(folder)
    end("open the headers")
    plan = prepare_quantize(take_apart(source, QuantizeOptions("", format="nvfp4")))
    end("plan, from the opened source")
    job = artifact_job(source, plan)
    end("records and index")
    document = describe_plan(job, Settings())
    end("document of the dry run")
    screen.Screen().show(document, draw_plan)
    end("draw it")
    return found


def measure_command(
    source: object, *options: str, environment: dict[str, str] | None = None
) -> Cost:
    """The cost of a whole dry run, which also says where a disk has no room for the result."""
    words = [str(COMMAND), "quantize", str(source), "--format", "nvfp4", "--dry-run", *options]
    variables = {**clean_environment(), **(environment or {})}
    with tempfile.TemporaryFile() as said:
        begun = time.perf_counter()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=variables)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if process.returncode and NO_ROOM not in text:
        raise SystemExit(f"{' '.join(words)}: exit status {process.returncode}\n{text}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def measure_hub(folder: Path) -> list[Cost]:
    """The dry run from a Hub on the loopback device, which is here, while the command has its own
    process.
    """
    sys.path.append(str(SUPPORT))
    from fakehub import FakeHub

    hub = FakeHub()
    hub.add(REPOSITORY, folder)
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / ".home")}
    found = [measure_command(REPOSITORY, "--json", environment=environment) for _ in range(ROUNDS)]
    hub.close()
    return found


def sections(is_quick: bool) -> list[Section]:
    """Quick: the same."""
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as scratch:
        folder = Path(scratch)
        count = write_checkpoint(folder)
        whole = {
            "`quantize --dry-run --json`": [
                measure_command(folder, "--json") for _ in range(ROUNDS)
            ],
            "`quantize --dry-run`": [measure_command(folder) for _ in range(ROUNDS)],
            "`quantize --dry-run --json` from a Hub on the loopback device": measure_hub(folder),
        }
        words = [sys.executable, "-m", "cpu.planning", str(folder)]
        printed = [
            subprocess.run(words, cwd=BENCHMARKS, check=True, capture_output=True, text=True).stderr
            for _ in range(ROUNDS)
        ]
        stages = [json.loads(text) for text in printed]
        parts = {name: [Cost(*stage[name]) for stage in stages] for name in stages[0]}
    about = (
        f"{count:,} tensors, {SHARDS} shards. Whole processes, from `execve` to their end, and "
        f"then the stages of one, which have no bar; the least of {ROUNDS}, for other work on the "
        "machine only adds, and the highest peak."
    )
    headings = ("work", "seconds", "CPU seconds", "peak RSS MB", "bar: CPU seconds", "bar: MB")
    rows = [
        *(_row(name, costs, has_bars=True) for name, costs in whole.items()),
        *(_row(f"stage: {name}", costs, has_bars=False) for name, costs in parts.items()),
    ]
    return [Section("Planning a trillion parameters", about, headings, tuple(rows))]


def _row(name: str, found: list[Cost], has_bars: bool) -> Row:
    cost = Cost(
        min(each.seconds for each in found),
        min(each.cpu_seconds for each in found),
        max(each.megabytes for each in found),
    )
    bars = ("", "")
    if has_bars:
        bars = (
            verdict(cost.cpu_seconds, BAR_CPU_SECONDS, is_floor=False),
            verdict(cost.megabytes, BAR_MEGABYTES, is_floor=False),
        )
    return Row(
        (name,), (f"{cost.seconds:.2f}", f"{cost.cpu_seconds:.2f}", f"{cost.megabytes:.0f}", *bars)
    )


if __name__ == "__main__":
    print(json.dumps(measure_stages(sys.argv[1])), file=sys.stderr)
