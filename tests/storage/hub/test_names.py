"""Names from the Hub that would act on a terminal: shown as what they are, by every command, and
kept in the artifact.
"""

import json

import pytest
from checkpoints import hidden_characters, run_alone, weight, write_single
from hub_cases import NVFP4, ask
from pushing import check_secrets

NAMES = (
    "\x1b[31mRED\x1b]0;pwned\x07",
    "[bold red]x[/bold red][link=file:///etc/passwd]y[/link]",
    "a\r\nINFO fake log line\n",
    "a\u202egnp.exe",
    "\x9b31mC1\x85",
    "[/nope]",
)


@pytest.fixture
def hostile(hub, tmp_path):
    """A repository whose tensors and files have names that act on terminals, and its artifact."""
    tensors = {f"layers.{n}.{name}.o_proj.weight": weight(n) for n, name in enumerate(NAMES)}
    tensors[f"layers.9.{NAMES[0]}.q_proj.weight"] = weight(9)
    tensors["layers.9.odd.weight"] = ("BF16", (4, 7), bytes(56))
    config = {"model_type": NAMES[0], "architectures": [NAMES[1]]}
    folder = write_single(tmp_path / "hostile", tensors, config)
    for name in NAMES:
        (folder / f"{name.replace('/', '_')}.txt").write_text("x")
    for ending in (".bin", ".py"):  # which warnings name
        (folder / f"{NAMES[0]}{ending}").write_text("x")
    hub.add("org/m", folder)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 0
    hub.add("org/q", tmp_path / "q")
    return folder


QUANTIZE = ("quantize", "org/m", "--format", "nvfp4")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "command",
    [
        (*QUANTIZE, "--dry-run"),
        (*QUANTIZE, "-o", "OUT/n"),
        (*QUANTIZE, "-o", "OUT/\x1b[31m", "--num-shards", "2", "--shard-index", "0"),
        (*QUANTIZE, "-o", "OUT/p", "--push-to-hub", "me/q"),
        ("quantize", "org/m", "--format", "\x1b[31m"),
        ("inspect", "org/q"),
        ("inspect", "org/q", "--source", "org/m", "--full"),
        ("verify", "org/q", "--source", "org/m", "--min-sqnr", "90"),
        ("dequantize", "org/q", "-o", "OUT/d"),
        ("transcode", "org/q", "-o", "OUT/t", "--dialect", "modelopt"),
        ("transcode", "org/q", "-o", "OUT/t", "--dialect", "mlx"),
        ("merge", "OUT/q"),
        ("merge", "OUT/\x1b[31m"),
    ],
    ids=lambda command: " ".join(command).replace("\x1b", "ESC"),
)
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["drawn", "json"])
def test_no_name_acts_on_a_terminal(command, form, hub, hostile, tmp_path, monkeypatch):
    monkeypatch.setattr("fp4convert.progress.LINE_SECONDS", 0.0)  # a line for every tensor
    outcome = ask(*(word.replace("OUT", str(tmp_path)) for word in command), *form)
    assert outcome.code in (0, 2, 5, 6)
    assert hidden_characters(outcome.out + outcome.err) == []
    assert "Traceback" not in outcome.err
    check_secrets(outcome.out + outcome.err)


def test_the_bytes_of_such_names_are_kept(hub, hostile, tmp_path):
    out = tmp_path / "q"
    names = {f"{name.replace('/', '_')}.txt" for name in NAMES}
    assert names <= {path.name for path in out.iterdir()}
    record = json.loads((out / "quantization_config.json").read_text())
    assert names <= record["files"].keys()
    assert run_alone("inspect", out, "--json").json["tensors"]["quantized"] == len(NAMES) + 1
