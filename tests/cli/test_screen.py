"""What a person sees: nothing that acts on a terminal, the layers folded, the worst first, and the
next step of every error.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from checkpoints import (
    LAYER,
    hidden_characters,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from gguf_donors import model, write_donor

from fp4convert.cli.draw_results import draw_result
from fp4convert.cli.screen import Screen
from fp4convert.errors import InputError
from fp4convert.report.text import escape


@pytest.fixture
def pair(tmp_path):
    """A source, and its artifact."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    return source, out


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
    for code in (
        *range(0x3000),
        *range(0xD7F0, 0xE010),
        *range(0xFE00, 0x10000),
        *range(0xE0000, 0xE0200),
    ):
        assert not hidden_characters(escape(chr(code)))


def test_a_file_gets_the_words_that_a_terminal_gets_without_the_colours(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    told = []
    for colours in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", colours)
        screen = Screen()
        for text in (
            "",
            "plain",
            "  [bold]x[/bold] :smile: é 漢字 ",
            "a\tb\x1b[31m",
            "word " * 400,
            "x" * 1500,
        ):
            screen.line(text)
            screen.line(text, "bold red")
            screen.line(text, "yellow", "warning x: ")
            screen.warn([text])
            screen.tell(text)
            screen.fail(InputError("usage", f"{text}one\ntwo", text))
        told.append(capsys.readouterr())
    plain, coloured = told
    assert plain.out.count("\n") == 18
    assert "\x1b" not in plain.out + plain.err
    for stream in ("out", "err"):
        assert "\x1b[1;31m" in getattr(coloured, stream)
        assert re.sub(r"\x1b\[[0-9;]*m", "", getattr(coloured, stream)) == getattr(plain, stream)


def test_a_drawn_result_ends_with_the_digest(tmp_path):
    words = ("quantize", write_llama(tmp_path / "source"), "--format", "nvfp4")
    digest = run(*words, "-o", tmp_path / "out", "--json").json["digest"]
    lines = run(*words, "-o", tmp_path / "out").out.splitlines()
    assert lines[0] == str(tmp_path / "out")
    assert lines[1:3] == [
        "  nvfp4, dialect compressed-tensors, rule mse",
        "  7 tensors quantized, 4 kept, 0 skipped",
    ]
    assert re.fullmatch(
        r"  87\.5 kB -> 50\.\d kB \(57 %\), 4\.507 bits per quantized weight", lines[3]
    )
    assert re.fullmatch(
        r"  SQNR 21\.\d\d dB on average, lowest 21\.\d\d dB \(model\.layers\.\d\.\S+\.weight\)",
        lines[4],
    )
    assert lines[5] == "  already there: nothing to do"
    assert lines[6] == f"  digest {digest}"
    assert lines[7].startswith("next: fp4convert verify ")


def test_a_drawn_result_tells_what_it_knows(capsys):
    result = {
        **{"output": "out", "format": "bf16", "dialect": None, "scale_rule": None, "digest": "d"},
        **{"device": "cuda:0", "seconds": 100.0, "bits_per_weight": 4.5},
        **{"source_bytes": 9 * 10**9, "output_bytes": 32 * 10**9, "adopted_bytes": 8 * 10**9},
        "tensors": {"dequantized": 7, "copied": 4, "skipped": 0},
    }
    draw_result(Screen(), result)
    assert capsys.readouterr().out.splitlines() == [
        "out",
        "  bf16",
        "  7 tensors dequantized, 4 kept, 0 skipped",
        "  9.00 GB -> 32.0 GB (356 %), 4.500 bits per quantized weight",
        "  in 1 min 40 s on cuda:0, 10.0 MB/s",
        "  digest d",
    ]


def test_a_drawn_merge_claims_no_reading(tmp_path):
    """Which shards were read again, docs/machines.md says."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    for index in range(2):
        part = ("--shard-index", index, "--num-shards", 2)
        assert run("quantize", source, "--format", "nvfp4", "-o", out, *part).code == 0
    digest = run("merge", out, "--json").json["digest"]
    lines = run("merge", out).out.splitlines()
    assert lines[0] == str(out)
    assert re.fullmatch(
        r"  2 shards merged \(nvfp4, compressed-tensors\), 50\.\d kB, in \S+ s", lines[1]
    )
    assert lines[2].startswith("  SQNR 21.")
    steps = [f"next: fp4convert verify {out} --source {source}", f"      vllm serve {out}"]
    assert lines[3:] == [f"  digest {digest}", *steps]


SHOWN = """
import time
from fp4convert.cli.screen import Screen
with Screen().phases() as phases:
    phases.begin("plan")
    phases.begin("quantize", 15_300_000_000)
    report = phases.report
    for number in range(30):
        report(f"model.layers.{number}.mlp.experts.133.gate_proj\\x1b[31m.weight", 400_000_000)
        time.sleep(0.05)
"""


def shown_on_a_terminal(width, *words, **environment):
    """What the program, or the command of these words, prints on a terminal of that width, with
    what drives the terminal taken out.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    known = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CI", "NO_COLOR", "COLUMNS", "TERM")
    }
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    with subprocess.Popen(
        [sys.executable, *(("-m", "fp4convert", *words) if words else ("-c", SHOWN))],
        **streams,
        env={**known, "TERM": "xterm", **environment},
    ):
        os.close(slave)
        printed = b""
        with suppress(OSError):  # how a terminal says that its program has ended
            while data := os.read(master, 1 << 16):
                printed += data
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Zhlm]", "", printed.decode()).replace("\r", "\n").split("\n")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("width", "has_bar"), [(40, False), (60, False), (80, True), (200, True)])
def test_on_a_terminal_every_phase_has_a_row_that_fits(width, has_bar):
    lines = shown_on_a_terminal(width)
    assert max(map(len, lines)) <= width
    last = [line for line in lines if line.startswith("quantize")][-1]
    assert "of 15.3 GB (" in last
    assert (("s left" in last) and ("/s, " in last)) is (width > 40)
    assert any("━" in line for line in lines) is has_bar
    assert any(line.startswith("plan ") for line in lines)
    tensors = [line for line in lines if line.startswith("model.layers.")]
    assert all(line.rstrip().endswith(".weight") for line in tensors)
    assert any(r"\x1b[31m" in line for line in tensors) or width == 40


@pytest.mark.sweep(2)
@pytest.mark.parametrize("width", [50, 80])
def test_on_a_terminal_results_are_wrapped_at_words(width, tmp_path):
    """But for what is copied: paths and commands."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    for words in (
        ("quantize", source, "--format", "nvfp4", "-o", out),
        ("verify", out, "--source", source),
        ("verify", out, "--source", source, "--min-sqnr", "99"),
        ("inspect", out),
        ("explain", "hash-mismatch"),
        ("doctor",),
    ):
        lines = shown_on_a_terminal(width, *map(str, words), CI="1")
        long = [line for line in lines if len(line) > width]
        assert all(
            line.startswith((str(tmp_path), "next: ", "      vllm", "disk "))
            or " " not in line.strip()
            for line in long
        ), (words, long)
        assert width > 50 or any(len(line) > width for line in run(*words).out.splitlines()), words
    shown = shown_on_a_terminal(width, "inspect", str(out), CI="1")
    assert " ".join(shown).split() == run("inspect", out).out.split(), "no word is lost"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("width", [50, 80])
def test_on_a_terminal_warnings_and_errors_are_wrapped_at_words(width, tmp_path):
    """But for the next step, which is copied."""
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    warned = ("quantize", source, "--format", "mxfp4", "-o", out)
    failed = ("inspect", source)
    for words, label in ((warned, "warning: "), (failed, "error[not-an-artifact]: ")):
        lines = shown_on_a_terminal(width, *map(str, words), CI="1")
        shown = [line for line in lines if str(tmp_path) not in line]
        assert any(line.startswith(label) for line in lines)
        long = [line for line in shown if len(line) > width]
        assert all(" " not in line.strip() for line in long), long
        told = run(*words, *(["--force"] if words is warned else [])).err.split()
        assert [word for word in told if word not in " ".join(lines).split()] == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_in_ci_and_on_a_terminal_that_cannot_move_there_is_no_bar(environment):
    assert "".join(shown_on_a_terminal(80, **environment)) == ""  # nor a line: it was over too soon


def test_a_line_of_a_log_is_escaped_and_quiet_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr("fp4convert.progress.LINE_SECONDS", 0.0)
    for is_quiet in (False, True):
        with Screen(is_quiet=is_quiet).phases() as phases:
            phases.begin("quantize", 1000)
            phases.report("a\x1b[31m" + "b" * 200, 500)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(r"quantize: 0.50 kB of 1.00 kB (50 %), a\x1b[31mbbb")
    assert len(lines[0]) < 160
    assert lines[1].startswith("quantize: 0.50 kB in 0.")


def test_a_drawn_artifact_tells_layout_scales_and_health(tmp_path):
    source = write_llama(tmp_path / "source")
    amax = ("--format", "nvfp4", "--scale-rule", "amax", "-o", tmp_path / "out")
    assert run("quantize", source, *amax).code == 0
    assert run("inspect", tmp_path / "out").out.splitlines() == [
        "format          nvfp4: fp4_e2m1 codes, 16 to a block, fp8_e4m3 block scales",
        "dialect         compressed-tensors",
        "global scale    fp32, stored as a divisor",
        "scale layout    linear (declared)",
        "nibble order    low_first",
        "activations     16 bits",
        "tensors         7 quantized, 4 other",
        "bits per weight 4.507 (codes, block scales and global scales)",
        "share read      100 % of the block scales",
        "recorded        SQNR 20.43 dB on average, lowest 20.26 dB "
        "(model.layers.0.self_attn.k_proj.weight)",
        "        3  nvfp4         model.layers.0.mlp.{gate,up,down}_proj",
        "        4  nvfp4         model.layers.0.self_attn.{q,k,v,o}_proj",
        "loads in        vllm          >=0.32",
        "loads in        sglang        >=0.5.22",
        "loads in        transformers  >=5",
        "healthy by its records and scales; verify --source compares the values",
    ]
    with_source = run("inspect", tmp_path / "out", "--source", source).out.splitlines()
    assert with_source[-1] == "healthy; a sample of its values matches source"


def test_a_drawn_artifact_tells_only_what_is_its_own(tmp_path):
    """No global scales of MXFP4; which nibble is first where that is not as usual."""
    source, donor = write_llama(tmp_path / "source"), tmp_path / "m.gguf"
    write_donor(donor, model())
    asked = ("quantize", "--format", "mxfp4", "-o")
    assert run(*asked, tmp_path / "ct", source).code == 0
    assert run(*asked, tmp_path / "gguf", donor, "--dialect", "gguf").code == 0
    lines = run("inspect", tmp_path / "ct").out.splitlines()
    assert "bits per weight 4.250 (codes and block scales)" in lines
    assert not [line for line in lines if line.startswith(("bits  ", "meaning", "elements"))]
    lines = run("inspect", tmp_path / "gguf").out.splitlines()
    assert "elements          16    0    17    1         31   15  all 32" in lines


def test_a_drawn_verification_shows_the_worst_tensors_first(pair):
    source, out = pair
    document = run("verify", out, "--source", source, "--json").json
    worst = sorted(document["tensors"], key=lambda entry: entry["sqnr_db"])[:5]
    lines = run("verify", out, "--source", source).out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [entry["name"] for entry in worst]
    assert [line.split()[1] for line in lines[1:6]] == [
        f"{entry['sqnr_db']:.2f}" for entry in worst
    ]
    assert lines[6].startswith("7 tensors: SQNR mean ")
    assert lines[7] == "nvfp4 by mse usually has 21.8 dB; below 20 dB is low"
    assert lines[8].startswith("recorded when it was quantized: SQNR 21.")
    assert lines[9:] == [
        "no fault found, no gate was set: 4 files hashed, scales of 7 modules read, 7 tensors"
        " compared with source"
    ]
    assert run("verify", out).out.splitlines()[-1] == (
        "no fault found, no gate was set: 4 files hashed, scales of 7 modules read; values were not"
        " compared: add --source"
    )
    gated = run("verify", out, "--source", source, "--min-sqnr", 10).out.splitlines()[-1]
    assert gated.startswith("passed: 4 files hashed")


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


def test_findings_name_level_code_and_tensor(pair):
    source, out = pair
    lines = run("verify", out, "--source", source, "--min-sqnr", "21.7").out.splitlines()
    name = f"{LAYER}.self_attn.k_proj.weight"
    told = rf"error sqnr-low: {re.escape(name)}: SQNR .* dB, expected at least 21\.7 dB"
    assert any(re.fullmatch(told, line) for line in lines)
    assert lines[-1] == "failed"


def test_findings_that_are_alike_are_one_line_with_the_worst(pair):
    source, out = pair
    gated = ("verify", out, "--source", source, "--min-sqnr", "30", "--max-nmse", "0.001")
    lines = run(*gated).out.splitlines()
    found = run(*gated, "--json").json
    worst = found["summary"]["worst"]
    for code, what in (("sqnr-low", "SQNR 21.617 dB"), ("nmse-high", "NMSE 0.00")):
        (line,) = [line for line in lines if line.startswith(f"error {code}: ")]
        assert line.startswith(f"error {code}: 7 of 7 tensors, the worst {worst}: {what}")
    assert "--json lists every tensor" in lines
    assert len(found["findings"]) == 14


def test_a_wrong_source_is_said_first_and_in_a_sentence(pair, tmp_path):
    source, out = pair
    names = [f"encoder.block.{at}.{part}.weight" for at in range(4) for part in ("q", "wi", "wo")]
    other = write_single(tmp_path / "other", {name: weight(1) for name in names})
    outcome = run("verify", out, "--source", other)
    lines = outcome.out.splitlines()
    assert outcome.code == 6
    assert lines[0] == "out was not made from other: they have no tensor in common"
    assert len(lines) <= 8
    document = run("verify", out, "--source", other, "--json").json
    assert document["verdict"] == lines[0]
    codes = {finding["code"] for finding in document["findings"]}
    assert codes == {"source-differs", "tensor-foreign", "kept-missing"}
    # the same model with other weights
    twin = write_llama(tmp_path / "twin")
    for shard in twin.glob("*.safetensors"):  # the last value first
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little") + 8
        pairs = [data[at : at + 2] for at in range(length, len(data), 2)]
        shard.write_bytes(data[:length] + b"".join(reversed(pairs)))
    document = run("verify", out, "--source", twin, "--json").json
    assert document["verdict"].startswith("out was not made from twin: none of 7 tensors")
    # the same weights, stored wrongly
    for shard in out.glob("*.safetensors"):
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little") + 8
        entries = json.loads(data[8:length])
        held = bytearray(data[length:])
        for name, entry in entries.items():
            if name.endswith(".weight_packed"):
                first, last = entry["data_offsets"]
                held[first:last] = bytes(byte >> 4 | (byte & 15) << 4 for byte in held[first:last])
        shard.write_bytes(data[:length] + held)
    swapped = run("verify", out, "--source", source, "--json").json
    assert swapped["verdict"] is None
    assert "nibble-order" in {finding["code"] for finding in swapped["findings"]}


def test_an_error_has_its_message_and_its_next_step_and_no_traceback(tmp_path):
    outcome = run("quantize", tmp_path / "absent", "--format", "nvfp4")
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0].startswith(f"error[no-source]: {tmp_path}/absent: no such file or folder")
    assert lines[1].startswith(" next: ")


def test_warnings_go_to_stderr_and_quiet_silences_them(tmp_path):
    source = write_checkpoint(
        tmp_path / "m",
        {"model.safetensors": {f"{LAYER}.self_attn.o_proj.weight": weight()}},
        **{"modeling.py": b"pass"},
    )
    command = ("quantize", source, "--format", "nvfp4")
    loud = run(*command, "-o", tmp_path / "a")
    assert loud.err.startswith("warning: the model has custom code")
    assert loud.err.count("custom code") == 1
    assert "warning:" not in loud.out
    quiet = run(*command, "-o", tmp_path / "b", "-q", "--json")
    assert quiet.err == ""
    assert [line.partition(" (")[0] for line in quiet.json["warnings"]] == [
        "the model has custom code"
    ]
    assert run(*command, "--dry-run", "--quiet").err == ""


def test_a_long_name_is_shortened_in_a_table_and_whole_in_json(tmp_path):
    name = "x" * 5000 + ".weight"
    source = write_single(tmp_path / "m", {name: weight()})
    drawn = run("quantize", source, "--format", "nvfp4", "--dry-run")
    assert max(len(line) for line in drawn.out.splitlines()) < 250
    plan = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json
    assert plan["tensors"][0]["name"] == name


def test_a_heading_of_two_lines_takes_two_rows(capsys):
    Screen().table(["kind", "nvfp4\namax"], [["q_proj", "9.59"]])
    assert capsys.readouterr().out.splitlines() == ["kind    nvfp4", "        amax", "q_proj  9.59"]
