"""`explain agents`: the loop that the page describes runs as it is written, on a small model."""

import json
import re
import shlex

import pytest
from checkpoints import run
from fakehub import TOKEN
from paths import ROOT
from pushing import FastTime
from tiny_chains import TEXT, make_model

from fp4convert.quality import evaluation
from fp4convert.quality.evaluation import UsualLoss

pytestmark = pytest.mark.engine


def page() -> str:
    return run("explain", "agents").out


@pytest.fixture
def loop(hub, tmp_path, monkeypatch):
    """What runs every command of the page, on the model in m and the text in text.txt."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)

    def run_all():
        words = {"SOURCE": "m", "ENGINE": "vllm", "TEXT": "text.txt", "ORG/NAME": "me/q"}
        blocks = re.findall(r"```sh\n(.*?)```", page(), re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        assert len(lines) == 7
        for number, line in enumerate(lines):
            out = "text-q" if "--text" in line and "quantize" in line else "q"
            known = {**words, "OUT": out}
            named = re.sub("|".join(known), lambda match, known=known: known[match[0]], line)
            command, _, file = named.partition(" > ")
            _, *arguments = shlex.split(command)
            found = run(*arguments)
            assert found.code == 0, (number, line, found.out, found.err)
            if file:
                (tmp_path / file).write_text(found.out)
            assert json.loads(found.out)
        assert len(hub.repos["me/q"].commits) == 2

    return run_all


def test_every_command_of_the_loop_runs(loop, tmp_path, monkeypatch):
    usual = (("rtn", 0.05), ("gptq", 0.02))
    rows = [UsualLoss("nvfp4", 16, method, 96_704, kl, 0.7, "a toy") for method, kl in usual]
    monkeypatch.setattr(evaluation, "usual_losses", lambda: tuple(rows))
    (tmp_path / "text.txt").write_text(TEXT)
    make_model(tmp_path / "m", "Llama")
    loop()


@pytest.mark.slow
def test_the_loop_accepts_a_trained_model(loop, tmp_path, monkeypatch):
    """SmolLM2, by the losses that the program itself knows as usual."""
    from quality import models

    monkeypatch.syspath_prepend(str(ROOT / "build" / "real" / "packages"))
    models.smollm2(tmp_path / "m")
    judged = models.write_text("judge", tmp_path / "judged.txt").read_text("utf-8")
    (tmp_path / "text.txt").write_text(judged[:16_000], "utf-8")
    loop()
    found = json.loads((tmp_path / "q.evaluation.json").read_text("utf-8"))
    assert found["grade"] == "as usual"


def test_the_keys_and_codes_that_it_names_exist(tmp_path):
    make_model(tmp_path / "m", "Llama")
    plan = run("quantize", tmp_path / "m", "--for", "vllm", "--dry-run", "--json").json
    made = run("quantize", tmp_path / "m", "--for", "vllm", "-o", tmp_path / "q", "--json").json
    known = {"usual_loss": None, **plan, **made}  # of a model whose size nobody measured
    for name in ("output_bytes", "peak_disk_bytes", "peak_memory_bytes", "unexplained", "warnings"):
        assert f"`{name}`" in page()
        assert name in plan
    for path in re.findall(r"`((?:engine|fidelity)\.\w+)`", page()):
        home, _, key = path.partition(".")
        assert key in known[home], path
    for code in ("engine-refuses", "no-usual-loss", "no-torch", "bad-text"):
        assert code in page()
        assert run("explain", code).code == 0
    assert len(page().splitlines()) <= 200
