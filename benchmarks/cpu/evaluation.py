"""evaluate, beside the forwards of two models that transformers holds whole.

The forwards are taken without loading: what evaluate needs more is to start, to read and unpack
weights a layer at a time, to keep hidden states on the disk, and to compare.
"""

from __future__ import annotations

from pathlib import Path

from cpu.conversion import THREADS, scratch_folder, words_of
from harness.checkpoints import HIDDEN, LAYER_NBYTES, MLP, VOCABULARY, make_checkpoint
from harness.processes import COMMAND, Cost, cost_here, median_of, ratio_of, run, take_turns
from harness.sections import Row, Section

GIGABYTES = 4.0
WINDOWS, LENGTH = 2, 512  # one batch
CPU_BAR, MEMORY_BAR = 1.3, 1.0
FREE_NBYTES = 300e6
# What one layer computes of the batch: gate, up and their product, and scores of heads three times.
ACTIVATIONS_NBYTES = 4 * 3 * WINDOWS * LENGTH * (MLP + HIDDEN // 128 * LENGTH)
LAYERS_NBYTES = 2 * 2 * LAYER_NBYTES  # two of them, in float32
ABOUT = (
    f"{GIGABYTES:g} GB of bf16 beside its NVFP4 artifact, {WINDOWS} windows of {LENGTH} tokens,"
    f" {THREADS} cores, warm. CPU-seconds of the whole command beside those of two forwards of the"
    " source by transformers in float32, all weights in memory. Anonymous memory at its highest"
    f" beside two layers in float32 ({LAYERS_NBYTES / 1e6:.0f} MB), activations"
    f" ({ACTIVATIONS_NBYTES / 1e6:.0f} MB) and {FREE_NBYTES / 1e6:.0f} MB."
)


def sections(is_quick: bool) -> list[Section]:
    """One round after one that does not count, quick or not: each takes minutes."""
    with scratch_folder() as scratch:
        source, artifact, text = (scratch / name for name in ("source", "artifact", "text.txt"))
        make_checkpoint(source, GIGABYTES)
        run(words_of(source, artifact, "amax"))
        numbers = (2 + (7919 * n) % (VOCABULARY - 2) for n in range(WINDOWS * LENGTH))
        text.write_text(" ".join(f"w{number}" for number in numbers))
        words = [COMMAND, "evaluate", artifact, "--source", source, "--text", text, "--json"]
        words += ["--sequence-length", LENGTH]
        works = {
            "evaluate": lambda: run(words, is_watched=True),
            "forwards": lambda: _run_forwards(source),
        }
        done = take_turns(works, 1)
    allowed = LAYERS_NBYTES + ACTIVATIONS_NBYTES + FREE_NBYTES
    ours, theirs = done["evaluate"], done["forwards"]
    cpu = (f"{median_of(each, 'cpu_seconds'):.1f} s" for each in (ours, theirs))
    peak = median_of(ours, "anonymous_nbytes")
    rows = (
        Row(("CPU-seconds",), tuple(cpu), ratio_of(ours, theirs, "cpu_seconds"), CPU_BAR),
        Row(
            ("anonymous memory",),
            (f"{peak / 1e6:.0f} MB", f"{allowed / 1e6:.0f} MB"),
            peak / allowed,
            MEMORY_BAR,
        ),
    )
    headings = ("what", "evaluate", "beside")
    return [Section("Evaluating", ABOUT, headings, rows, "times that", is_floor=False)]


def _run_forwards(source: Path) -> Cost:
    """Two forwards of the text's size; what the ids are makes no difference."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(WINDOWS * LENGTH).reshape(WINDOWS, LENGTH) % VOCABULARY
    with torch.no_grad():
        return cost_here(lambda: [made(input_ids=ids, use_cache=False) for _ in range(2)])
