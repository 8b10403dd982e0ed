"""What a person sees: nothing that acts on a terminal, the layers folded, the worst first, and the next step of every error."""

import json
import re

import pytest
from checkpoints import LAYER, hidden_characters, run, weight, write_checkpoint, write_llama, write_single

from fp4convert.render import escape


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ASCII, é, 漢字, 🙂", "plain ASCII, é, 漢字, 🙂"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("\r\n\t\0\x07\x7f", r"\x0d\x0a\x09\x00\x07\x7f"),
        ("\x9b1m", r"\x9b1m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2066\u2069\u200e\u200b\ufeff", r"\u2066\u2069\u200e\u200b\ufeff"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\udc80", r"\udc80"),
        ("\U000e0041", r"\U000e0041"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        (7, "7"),
    ],
)
def test_escape_shows_what_could_act_on_a_terminal(text, shown):
    assert escape(text) == shown


def test_every_single_character_is_shown_or_harmless():
    for code in (*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10000), *range(0xE0000, 0xE0200)):
        assert not hidden_characters(escape(chr(code)))


def test_a_drawn_plan_folds_layers_and_says_why(tmp_path):
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
    outcome = run("quantize", write_checkpoint(tmp_path / "m", shards), "--format", "nvfp4", "--dry-run")
    lines = [re.sub(r" {2,}", "|", line).rstrip("|") for line in outcome.out.splitlines()]
    # 12 matrices of 32 x 64: 4096 bytes each; 1024 of codes, 128 of block scales and 4 of a global scale become of it
    assert lines[:5] == [
        "tensors|count|action|reason|group|before|after",
        "model.layers.*.mlp.gate_proj.weight|12|quantize|a linear layer|gate_proj/up_proj|0.05 MB|0.01 MB",
        "model.layers.*.mlp.up_proj.weight|12|quantize|a linear layer|gate_proj/up_proj|0.05 MB|0.01 MB",
        "model.layers.*.odd.weight|1|skip|24 columns, not a multiple of the block of 16|0.00 MB|0.00 MB",
        "model.embed_tokens.weight|1|copy|an embedding|0.00 MB|0.00 MB",
    ]
    assert re.fullmatch(r"total 0\.10 MB -> 0\.04 MB", lines[5])  # 31936 bytes of tensors, and the header
    assert len(lines) == 6


def test_a_drawn_result_ends_with_the_digest(tmp_path):
    source = write_llama(tmp_path / "source")
    digest = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--json").json["digest"]
    lines = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out").out.splitlines()
    assert lines[0] == str(tmp_path / "out")
    assert re.fullmatch(r"  7 tensors \w+ \(nvfp4, compressed-tensors, amax\), 4 kept, 0 skipped", lines[1])
    assert re.fullmatch(r"  0\.09 MB -> 0\.\d\d MB in \d+\.\d\d s on cpu", lines[2])
    assert lines[3] == f"  digest {digest}"


def test_a_drawn_artifact_tells_layout_scales_and_health(tmp_path):
    assert run("quantize", write_llama(tmp_path / "source"), "--format", "nvfp4", "-o", tmp_path / "out").code == 0
    assert run("inspect", tmp_path / "out").out.splitlines() == [
        "format          nvfp4: fp4_e2m1 codes, 16 to a block, fp8_e4m3 block scales",
        "dialect         compressed-tensors",
        "global scale    fp32, stored as a divisor",
        "scale layout    linear (declared), unknown by statistics",
        "nibble order    low_first",
        "activations     16 bits",
        "tensors         7 quantized, 4 other",
        "bits per weight 4.507 (codes, block scales and global scales)",
        "share read      100 % of the block scales",
        "healthy",
    ]


def test_a_drawn_verification_shows_the_worst_tensors_first(tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    document = run("verify", out, "--source", source, "--json").json
    worst = sorted(document["tensors"], key=lambda entry: entry["sqnr_db"])[:5]
    lines = run("verify", out, "--source", source).out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [entry["name"] for entry in worst]
    assert [line.split()[1] for line in lines[1:6]] == [f"{entry['sqnr_db']:.2f}" for entry in worst]
    assert lines[6].startswith("7 tensors: SQNR mean ")
    assert lines[7:] == ["passed"]


def test_a_tensor_that_cannot_be_measured_stands_among_the_worst(tmp_path):
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(8)]
    source = write_single(tmp_path / "source", {name: weight(at) for at, name in enumerate(names)})
    out = tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    data = bytearray((out / "model.safetensors").read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[names[3].replace(".weight", ".weight_scale")]
    data[8 + length + entry["data_offsets"][0]] = 0x7F
    (out / "model.safetensors").write_bytes(data)
    shown = run("verify", out, "--source", source)
    assert shown.code == 6
    assert any(line.startswith(names[3]) for line in shown.out.splitlines()[1:6])


def test_findings_name_level_code_and_tensor(tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    lines = run("verify", out, "--source", source, "--min-sqnr", "300").out.splitlines()
    name = f"{LAYER}.mlp.down_proj.weight"
    assert any(re.fullmatch(rf"error sqnr-low: {re.escape(name)}: SQNR .* dB, expected at least 300 dB", line) for line in lines)
    assert lines[-1] == "failed"


def test_an_error_has_its_message_and_its_next_step_and_no_traceback(tmp_path):
    outcome = run("quantize", tmp_path / "absent", "--format", "nvfp4")
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0].startswith(f"error: {tmp_path}/absent: no such file or folder")
    assert lines[1].startswith(" next: ")


def test_warnings_go_to_stderr_and_quiet_silences_them(tmp_path):
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": {f"{LAYER}.self_attn.q_proj.weight": weight()}})
    loud = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "a")
    assert loud.err.startswith("warning: 1 scale groups")
    assert "warning:" not in loud.out
    assert run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "b", "--quiet").err == ""
    assert run("quantize", source, "--format", "nvfp4", "--dry-run", "-q").err == ""


def test_a_long_name_is_shortened_in_a_table_and_whole_in_json(tmp_path):
    name = "x" * 5000 + ".weight"
    source = write_single(tmp_path / "m", {name: weight()})
    drawn = run("quantize", source, "--format", "nvfp4", "--dry-run")
    assert max(len(line) for line in drawn.out.splitlines()) < 250
    assert run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json["tensors"][0]["name"] == name
