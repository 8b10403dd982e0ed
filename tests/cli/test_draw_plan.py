"""The plan on a terminal: what becomes of the experts, the attention and the embedding, at a glance
on 100 columns.
"""

import re

import pytest
from checkpoints import LAYER, run, weight, write_checkpoint
from true_shapes import deepseek_v3, write_holes

from fp4convert.cli.draw_plan import draw_plan
from fp4convert.cli.screen import Screen

SECONDS = {
    "device": "cpu",
    "threads": 2,
    "arithmetic": 131.0,
    "hashing": 197.0,
    "work": 328.0,
    "reading": {"at_1_gb_per_second": 1369.0, "at_100_mb_per_second": 13690.0},
}


def row(pattern, action="quantize", reason="a linear layer", **more):
    known = {"count": 1, "group": None, "format": "nvfp4" if action == "quantize" else None}
    known |= {"pattern": pattern, "action": action, "reason": reason}
    return {**known, "source_bytes": 2000, "output_bytes": 500, **more}


def draw(capsys, rows, width=100, **more):
    totals = {"source_bytes": 1_370_000_000_000, "output_bytes": 389_000_000_000}
    totals |= {"bits_per_weight": 4.5, "added_bytes": 0}
    peaks = {"peak_memory_bytes": 138_000_000, "peak_disk_bytes": 389_100_000_000}
    screen = Screen()
    screen.width = width
    draw_plan(screen, {**totals, **peaks, "patterns": rows, "seconds_estimated": SECONDS, **more})
    return capsys.readouterr().out.splitlines()


def test_a_drawn_plan_joins_layers_and_says_why(tmp_path):
    shards = {
        "model.safetensors": {
            **{
                f"model.layers.{layer}.mlp.{leaf}.weight": weight(layer)
                for layer in range(12)
                for leaf in ("gate_proj", "up_proj")
            },
            "model.embed_tokens.weight": weight(),
            f"{LAYER}.odd.weight": weight(0, 2, 24),
        }
    }
    outcome = run(
        "quantize", write_checkpoint(tmp_path / "m", shards), "--format", "nvfp4", "--dry-run"
    )
    lines = [re.sub(r" {2,}", "|", line).rstrip("|") for line in outcome.out.splitlines()]
    # 24 matrices of 32 x 64: 4096 bytes each; 1024 of codes, 128 of block scales and 4 of a global
    # scale become of it
    assert lines[:8] == [
        "modules|count|becomes|before|after|why",
        "model.embed_tokens|1|kept|4.10 kB|4.10 kB|an embedding",
        f"{LAYER}.odd|1|skipped|0.10 kB|0.10 kB|24 columns, not a multiple of the block of 16",
        "model.layers.[0-11].mlp",
        "|{gate,up}_proj|24|nvfp4|98.3 kB|27.7 kB|one scale: {gate,up}_proj",
        "",
        "nvfp4|24 modules, 98.3 kB -> 27.7 kB",
        "kept|2 tensors, 4.19 kB",
    ]
    # 31,936 bytes of tensors, the header and the records
    assert re.fullmatch(
        r"total\|105 kB -> 4\d\.\d kB \(\d\d %\), 4\.516 bits per quantized weight", lines[8]
    )
    assert lines[9].startswith("peak|memory ")
    assert len(lines) == 12


def test_the_totals(capsys):
    lines = draw(
        capsys,
        [row("lm_head", "copy", "an output head", output_bytes=2000), row("a.b", count=1234)],
    )
    assert max(map(len, lines)) <= 100
    assert lines[-6:] == [
        "nvfp4    1,234 modules, 2.00 kB -> 0.50 kB",
        "kept     1 tensor, 2.00 kB",
        "total    1.37 TB -> 389 GB (28 %), 4.500 bits per quantized weight",
        "peak     memory 138 MB, disk 389 GB",
        "time     5 min 28 s on cpu: arithmetic 2 min 11 s, hashing 3 min 17 s; disk writes not "
        "included",
        "reading  meanwhile: 22 min 49 s at 1 GB/s, 3 h 48 min at 100 MB/s",
    ]


def test_packed_weights_that_stay_are_pointed_out(capsys):
    rows = [
        row("a.[0-3].q", "dequantize", "excluded by '*q'", source_bytes=1000, output_bytes=2000)
    ]
    lines = draw(capsys, rows, added_bytes=1000)
    assert " ".join(lines[2].split()) == "q 1 bf16 1.00 kB 2.00 kB excluded by '*q'"
    told = "bf16     adds 1.00 kB: packed weights that are kept; --keep-packed leaves them packed"
    assert told in lines
    assert "kept     1 tensor, 1.00 kB -> 2.00 kB" in lines


def test_nothing_to_quantize_and_nothing_at_all(capsys):
    kept = draw(capsys, [row("a", "copy", "a norm", output_bytes=2000)], bits_per_weight=None)
    assert not any("bits per weight" in line for line in kept)
    empty = draw(capsys, [], source_bytes=0, output_bytes=8, bits_per_weight=None)
    assert "total    0.00 kB -> 0.01 kB" in empty


def test_a_long_reason_goes_on_below_itself(capsys):
    lines = draw(
        capsys, [row("m.[0-1].a", "copy", "a reason of many words " * 5), row("m.[0-1].b")]
    )
    at = lines[0].index("why")
    assert [line[at:] for line in lines[2:5]] == [
        "a reason of many words a reason of many words a reason of",
        "many words a reason of many words a reason of many words",
        "a linear layer",
    ]
    assert lines[3][:at].isspace()


def test_a_name_too_long_for_its_column_has_a_line_to_itself(capsys):
    long = "a_name_of_many_words_" * 3
    lines = draw(capsys, [row("m.[0-1].short"), row(f"m.[0-1].{long}", "copy", "a norm")])
    at = lines[0].index("why")
    assert lines[2].startswith("  short  ")
    assert lines[3] == f"  {long}"
    assert lines[4][at:] == "a norm"
    assert lines[4].split() == ["1", "kept", "2.00", "kB", "0.50", "kB", "a", "norm"]
    assert f"  {long}" in draw(capsys, [row(f"m.[0-1].{long}")])  # where none fits, too


def test_names_and_ranges_longer_than_the_terminal_go_on_after_a_comma(capsys):
    # every fourth layer has attention of another kind
    layers = f"[{','.join(map(str, range(3, 123, 4)))}]"
    leaves = ",".join(f"a_leaf_with_number_{at}" for at in range(20))
    lines = draw(
        capsys,
        [row(f"m.{layers}.x", count=30), row(f"m.[0-1].{{{leaves}}}", "copy", "a norm")],
        bits_per_weight=None,
    )
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= 100
    told = "".join(line.strip() for line in table)
    assert layers in told
    assert f"{{{leaves}}}" in told


def test_a_number_stands_with_the_word_before_it(capsys):
    names = ("attn.to_q", "attn.to_out.0", "attn.to_out.0.bias", "ff.net.2", "ff.net.0.proj")
    lines = draw(capsys, [row(f"b.[0-1].{name}") for name in names])
    assert [line.split()[0] for line in lines[1:8]] == [
        *("b.[0-1].attn", "to_q", "to_out.0", "to_out.0.bias"),
        *("b.[0-1].ff", "net.2", "net.0.proj"),
    ]
    assert draw(capsys, [row("m.[0-1]"), row("0.[1-2]")])[1].startswith("m.[0-1] ")
    assert draw(capsys, [row("m.[0-1].0.x")])[1] == "m.[0-1]"


def test_a_shared_scale_hides_no_reason(capsys):
    shared = {"group": "gate_proj/up_proj"}
    reasons = (
        "a linear layer",
        "a linear layer, from int4 32",
        "mxfp4, whose blocks nvfp4 represents exactly",
    )
    lines = draw(
        capsys,
        [
            row(f"m.[0-1].{at}.{{gate,up}}_proj", reason=reason, **shared)
            for at, reason in enumerate(reasons)
        ],
        200,
    )
    assert [line.split("kB")[-1].strip() for line in lines if "one scale" in line] == [
        "one scale: {gate,up}_proj",
        "from int4 32; one scale: {gate,up}_proj",
        "mxfp4, whose blocks nvfp4 represents exactly; one scale: {gate,up}_proj",
    ]


def test_what_could_act_on_a_terminal_is_shown(capsys):
    lines = draw(capsys, [row("m\x1b[31m.[0-1].x\x1b", "copy", "excluded by '\x9b'")])
    assert not any(character in line for line in lines for character in "\x1b\x9b")
    assert lines[1] == r"m\x1b[31m.[0-1]"
    assert r"x\x1b" in lines[2]
    assert r"'\x9b'" in lines[2]


@pytest.mark.parametrize("width", [100, 120, 200])
def test_a_real_plan_fits_the_terminal(width, capsys, tmp_path):
    source = write_holes(tmp_path / "m", "deepseek_v3", deepseek_v3(layers=12, experts=8))
    rows = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json["patterns"]
    lines = draw(capsys, rows, width)
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= width
    assert "model.layers.[3-12].mlp.experts.[0-7]" in table
    headings = [
        line for line in table if not line.startswith(" ") and line.startswith("model.layers.[")
    ]
    assert len(headings) == len(set(headings))  # what has one parent stands together


def test_a_narrow_plan_has_its_sizes_in_the_totals_alone(capsys):
    rows = [row("lm_head", "copy", "an output head", output_bytes=2000), row("a.b", count=1234)]
    wide, narrow = draw(capsys, rows, 80), draw(capsys, rows, 79)
    assert wide[0].split() == ["modules", "count", "becomes", "before", "after", "why"]
    assert narrow[0].split() == ["modules", "count", "becomes", "why"]
    assert narrow[2].split() == ["a.b", "1,234", "nvfp4", "a", "linear", "layer"]
    assert narrow[3:] == wide[3:]
