"""evaluate: the grade of an artifact in every place, baselines, and refusals before models run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import Outcome, run
from tiny_chains import LENGTH, TEXT, make_model

from fp4convert.quality import evaluation
from fp4convert.quality.evaluation import UsualLoss

pytestmark = pytest.mark.engine
# Of the Llama below: 3 layers of 12,288 + 18,432 + 128 parameters, 2 x 2,048 + 64 around them.
ROW = UsualLoss("nvfp4", 16, "rtn", 96_704, 0.035, 0.73, "measured: a toy")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return make_model(tmp_path / "m", "Llama")


def evaluate(artifact: Path, source: Path, *options: object) -> Outcome:
    text = source.parent / "text.txt"
    window = ("--sequence-length", LENGTH) if "--sequence-length" not in options else ()
    return run("evaluate", artifact, "--source", source, "--text", text, *window, *options)


def damage(artifact: Path) -> Path:
    """Double all scales of one layer, which are divided by the global one."""
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(artifact, artifact.with_name("broken"))
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "layers.1." in name and name.endswith("weight_global_scale"):
            tensor.mul_(0.5)
    save_file(tensors, file, {"format": "pt"})
    return broken


def test_a_broken_artifact_is_damaged_and_every_place_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "usual_losses", lambda: (ROW,))
    sound, page, card = tmp_path / "a", tmp_path / "page.html", tmp_path / "card.md"
    quantize(source, sound)
    for artifact, grade in ((sound, "as usual"), (damage(sound), "damaged")):
        places = ("--report", page, "--card", card)
        shown = evaluate(artifact, source, *places)
        assert (shown.code, "passed" in shown.out) == (0, False)
        found = evaluate(artifact, source, "--json").json
        assert (found["grade"], found["passed"]) == (grade, None)
        assert found["usual"] == {**ROW._asdict(), "kl": pytest.approx(ROW.kl)}
        words = f"{grade}; usual are KL 0.035 and 73.0 % for nvfp4 by rtn, 16-bit activations"
        words += " and 96,704 parameters"
        assert f"grade           {words}" in shown.out
        assert f"| grade | {words}" in card.read_text()
        (data,) = re.findall(r'type="application/json" id="data">(.*?)</script>', page.read_text())
        assert dict(json.loads(data)["answers"]["rows"])["grade"].startswith(words)
        gated = evaluate(artifact, source, "--max-kl", "damage", "--json")
        assert (gated.code, gated.json["passed"]) == ((0, True), (6, False))[grade == "damaged"]
    words = ("--text", tmp_path / "text.txt", "--sequence-length", LENGTH)
    both = run("compare", sound, artifact, "--source", source, *words)
    assert re.search(r"^a .* as usual *\nb .* damaged *$", both.out, re.MULTILINE)


def test_without_a_row_nothing_is_graded(source: Path, tmp_path: Path) -> None:
    """The smallest model with a figure has a thousand times as many parameters."""
    quantize(source, tmp_path / "a")
    shown = evaluate(tmp_path / "a", source)
    assert re.search(r"^grade +no figure to compare with$", shown.out, re.MULTILINE)
    found = evaluate(tmp_path / "a", source, "--json").json
    assert (found["grade"], found["usual"]) == ("no figure to compare with", None)


def test_a_worse_artifact_fails_beside_its_baseline(source: Path, tmp_path: Path) -> None:
    paths = {fmt: tmp_path / fmt for fmt in ("nvfp4", "mxfp4")}
    records = {}
    for fmt, path in paths.items():
        quantize(source, path, "--format", fmt)
        records[fmt] = tmp_path / f"{fmt}.json"
        records[fmt].write_text(evaluate(path, source, "--json").out)
    for before, after, code in (
        ("nvfp4", "nvfp4", 0),
        ("mxfp4", "nvfp4", 0),
        ("nvfp4", "mxfp4", 6),
    ):
        ended = evaluate(paths[after], source, "--baseline", records[before], "--json")
        assert ended.code == code
        old, new = (json.loads(records[one].read_text())["kl"] for one in (before, after))
        mean = sum(b - a for a, b in zip(old["windows"], new["windows"], strict=True)) / 6
        beside = ended.json["baseline"]
        assert beside["difference"] == pytest.approx(mean, abs=1e-9)
        assert beside["kl"] == old["mean"]
        assert [one["code"] for one in ended.json["findings"]] == ["kl-regressed"] * (code == 6)
    shown = evaluate(paths["mxfp4"], source, "--baseline", records["nvfp4"]).out
    assert re.search(r"^baseline +KL .*; the difference is \+.* nats, standard error", shown, re.M)
    assert shown.rstrip().endswith("failed")


def test_what_cannot_be_judged_is_refused_before_models_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4convert.calibration import side_by_side

    artifact, record = tmp_path / "a", tmp_path / "b.json"
    quantize(source, artifact)
    record.write_text(evaluate(artifact, source, "--json").out)
    (tmp_path / "empty.json").write_text("{}")
    one = evaluate(artifact, source, "--samples", 1, "--json").out
    (tmp_path / "one.json").write_text(one)

    def run_layers(run: object) -> None:
        raise AssertionError("the models run")

    monkeypatch.setattr(side_by_side._Run, "_run_layers", run_layers)
    baseline = ("--baseline", record)
    refusals = [
        (("--max-kl", "usual"), "no-usual-loss"),
        (("--max-kl", "damage"), "no-usual-loss"),
        (("--max-kl", "little"), "bad-gate"),
        ((*baseline, "--samples", 3), "bad-baseline"),
        ((*baseline, "--sequence-length", 16), "bad-baseline"),
        (("--baseline", tmp_path / "empty.json"), "bad-baseline"),
        (("--baseline", tmp_path / "one.json"), "bad-baseline"),
        (("--baseline", tmp_path / "none.json"), "bad-baseline"),
    ]
    for options, code in refusals:
        refused = evaluate(artifact, source, *options, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, code), options
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    refused = evaluate(artifact, source, *baseline, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "bad-baseline")


def test_a_plan_says_what_is_usual_and_what_a_text_brings(tmp_path):
    """SmolLM2's own numbers of weights, by its headers alone; a file without room for the data."""
    from fp4convert.quality.evaluation import forecast
    from fp4convert.recipes.recipe import Target
    from fp4convert.storage.open import open_source

    folder = tmp_path / "m"
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (49152, 576), "model.w.weight": (184375, 576)}
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    for name, kl in (("LlamaForCausalLM", 0.2266), ("LlamaModel", None)):
        config = {"architectures": [name], "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(config))
        found = forecast(Target("nvfp4", "compressed-tensors"), open_source(str(folder)))
        assert (found and round(found["kl"], 4)) == kl
        assert found is None or round(found["with_text"]["kl"], 4) == 0.0616
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    by_text = Target("nvfp4", "compressed-tensors", method="gptq")
    assert forecast(by_text, open_source(str(folder)))["with_text"] is None
