"""evaluate, beside transformers' own forwards of whole models: the source, and what dequantize
makes of the artifact.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from artifacts import quantize
from checkpoints import Outcome, run
from families import FAMILIES
from family import Family, build, load
from packings import compressed, fp8_blocks, pack_checkpoint
from tiny_chains import LENGTH, SAMPLES, TEXT, make_model, tokens_of, write_tokenizer
from tiny_models import read_tensors

pytestmark = pytest.mark.engine
RTOL = 1e-4  # of the mean KL: float32, added in another order
QUICK = ("llama", "qwen3_moe", "gpt_oss", "gemma3")
RUN = [
    family if family.name in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
    if family.model and family.name != "whisper"
]


MEASURED = """
import sys
from fp4convert.cli.app import main
try:
    main()
finally:
    print(open("/proc/self/status").read(), file=sys.stderr)
"""


def evaluate(artifact: Path, source: Path, text: Path, *options: object) -> Outcome:
    """The command, in this process, on windows of LENGTH."""
    named = ("--source", source, "--text", text, "--sequence-length", LENGTH)
    return run("evaluate", artifact, *named, *options, "--json")


def judge(family: Family, source: Path, artifact: Path) -> dict[str, Any]:
    """Whole models by transformers, and formulas of torch."""
    import torch
    from torch.nn import functional

    ids = torch.tensor(tokens_of(TEXT)).reshape(SAMPLES, LENGTH)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    logs: list[Any] = []
    with torch.no_grad():
        for folder in (source, artifact):
            logits = load(family, folder, dtype="float32", **eager)(input_ids=ids).logits
            logs.append(logits[:, :-1].double().log_softmax(-1).flatten(0, 1))
    p, q = logs
    kl = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    targets = ids[:, 1:].flatten()
    losses = [functional.nll_loss(each, targets).exp().item() for each in logs]
    agree = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    return {
        "windows": kl.reshape(SAMPLES, -1).mean(1).tolist(),
        "sure": (p.amax(-1).exp() >= 0.9).sum().item(),
        "mean": kl.mean().item(),
        "p999": kl.quantile(0.999).item(),
        "max": kl.max().item(),
        "top1": agree,
        "source": losses[0],
        "artifact": losses[1],
    }


@pytest.mark.parametrize("family", RUN, ids=str)
def test_the_figures_are_those_of_the_whole_models(family: Family, tmp_path: Path) -> None:
    source = build(family, tmp_path / "m")
    write_tokenizer(source)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    artifact, restored = tmp_path / "a", tmp_path / "r"
    quantize(source, artifact)
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    found = evaluate(artifact, source, text)
    assert found.code == 0, found.err
    judged = judge(family, source, restored)
    document = found.json
    assert (document["tokens"], document["windows"]) == (SAMPLES * (LENGTH - 1), SAMPLES)
    for kind in ("mean", "p999", "max", "windows"):
        assert document["kl"][kind] == pytest.approx(judged[kind], rel=RTOL)
    for side in ("source", "artifact"):
        assert document["ppl"][side] == pytest.approx(judged[side], rel=1e-6)
    assert document["top1"] == pytest.approx(judged["top1"], abs=1e-9)
    assert document["flips"]["of"] == judged["sure"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A Llama, and an artifact of it."""
    source = make_model(folder / "m", "Llama")
    quantize(source, folder / "a")
    return source, folder / "a"


@pytest.mark.parametrize("is_packed", [True, False])
def test_gates_that_are_missed_are_in_sarif(is_packed: bool, tmp_path: Path, text: Path) -> None:
    """Of a four-bit artifact, and of the very weights of the source."""
    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    if is_packed:
        quantize(source, artifact, "--format", "mxfp4")
    else:
        shutil.copytree(source, artifact)
    limits = ("--max-kl", 0, "--min-top1", 1, "--max-ppl-ratio", 0)
    file = tmp_path / "found.sarif"
    found = evaluate(artifact, source, text, *limits, "--sarif", file)
    assert found.code == 6
    codes = ["kl-high", "top1-low", "ppl-high"] if is_packed else ["ppl-high"]
    (judged,) = json.loads(file.read_text())["runs"]
    assert [each["ruleId"] for each in judged["results"]] == codes
    inside = evaluate(artifact, source, text, "--sarif", artifact / "found.sarif")
    assert (inside.code, inside.json["error"]["code"]) == (2, "file-in-artifact")


def test_the_page_has_the_figures(tmp_path: Path, text: Path) -> None:
    source, artifact = make_pair(tmp_path)
    page = tmp_path / "page.html"
    found = evaluate(artifact, source, text, "--by-layer", "--max-kl", 0, "--report", page)
    assert found.code == 6
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert data
    sheet = json.loads(data[1])
    words = f"failed: 1 error; KL {found.json['kl']['mean']:.3g}: {found.json['grade']}"
    assert not sheet["verdict"]["is_good"]
    assert sheet["verdict"]["words"].startswith(words)
    assert [each["code"] for each in sheet["findings"]] == ["kl-high"]
    answers = dict(sheet["answers"]["rows"])
    assert answers["KL divergence"].startswith(f"{found.json['kl']['mean']:.5g} nats")
    assert answers["same top token"] == f"{100 * found.json['top1']:.2f} %"
    alone = [f"{row['alone']:.4g}" for row in found.json["by_layer"]]
    assert [cells[1] for cells in sheet["answers"]["layers"]] == alone
    plain = evaluate(source, source, text, "--report", page)
    assert (plain.code, plain.json["error"]["code"]) == (2, "not-an-artifact")


def test_the_card_has_the_figures(tmp_path: Path, text: Path) -> None:
    """A section, which a later run replaces; what else is there stays as it is."""
    source, artifact = make_pair(tmp_path)
    digest = run("inspect", artifact, "--json").json
    card = artifact / "README.md"
    card.write_bytes(b"# Mine\r\n\r\nwords\r\n")
    for options in ((), ("--by-layer",)):
        found = evaluate(artifact, source, text, "--card", card, *options)
        assert found.code == 0, found.err
        written = card.read_bytes().decode()
        assert written.startswith("# Mine\r\n\r\nwords\n\n<!-- made")
        assert written.count("## Predictions") == 1
        assert f"| KL divergence | {found.json['kl']['mean']:.5g} nats" in written
        assert f"| same top token | {100 * found.json['top1']:.2f} % |" in written
    assert "\n| model.layers.0 | " in written
    assert run("verify", artifact, "--source", source).code == 0
    assert run("inspect", artifact, "--json").json == digest
    for place in (artifact / "other.md", tmp_path):
        refused = evaluate(artifact, source, text, "--card", place)
        assert refused.code in (2, 5)
    lone = "# Mine\n\n<!-- made: fp4convert evaluate -->\nold\n\nmy own text\n"
    for broken in (lone, lone.replace("made:", "end:")):
        card.write_text(broken)
        assert evaluate(artifact, source, text, "--card", card).code == 5
        assert card.read_text() == broken
    card.write_bytes(b"\xff\xfe")
    refused = evaluate(artifact, source, text, "--card", card)
    assert (refused.code, refused.json["error"]["code"]) == (5, "cannot-write")
    assert card.read_bytes() == b"\xff\xfe"


def test_a_model_is_itself(tmp_path: Path, text: Path) -> None:
    source = make_model(tmp_path / "m", "Qwen3Moe")
    twin = shutil.copytree(source, tmp_path / "twin")
    document = evaluate(twin, source, text).json
    assert 0 <= document["kl"]["max"] < 1e-9
    assert (document["top1"], document["passed"]) == (1.0, None)
    assert document["ppl"]["source"] == document["ppl"]["artifact"]


@pytest.mark.parametrize("fault", ["layers", "expert"])
def test_what_is_not_where_it_belongs_is_seen(
    fault: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the very same weights: the sweep above would fail for a fault of that kind."""
    from fp4convert.calibration import model, observers

    source = make_model(tmp_path / "m", "Qwen3Moe")
    twin = shutil.copytree(source, tmp_path / "twin")
    if fault == "layers":
        read = model.read_tensor

        def swapped(ref: Any, given: Any) -> Any:
            if "twin" in given.name and ".layers.0.self_attn.q_proj" in ref.name:
                others = given.checkpoint.tensors
                name = ref.name.replace("layers.0", "layers.1")
                ref = next(other for other in others if other.name == name)
            return read(ref, given)

        monkeypatch.setattr(model, "read_tensor", swapped)
    else:
        run_expert, calls = observers.Watch._run_expert, iter(range(10**6))

        def forgotten(watch: Any, module: Any, expert: int, given: Any, share: Any) -> Any:
            made = run_expert(watch, module, expert, given, share)
            return 0 * made if next(calls) % 7 == 0 else made

        monkeypatch.setattr(observers.Watch, "_run_expert", forgotten)
    assert evaluate(twin, source, text).json["kl"]["mean"] > 1e-4


def test_layers_add_up(tmp_path: Path, text: Path) -> None:
    """One layer alone is what a checkpoint with that layer of the artifact gives; all of them
    together are the artifact.
    """
    from safetensors.torch import load_file, save_file

    source = make_model(tmp_path / "m", "Llama")
    artifact, restored = tmp_path / "a", tmp_path / "r"
    quantize(source, artifact, "--format", "mxfp4")
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    document = evaluate(artifact, source, text, "--by-layer").json
    rows = {row["layer"]: row for row in document["by_layer"]}
    assert list(rows) == [*(f"model.layers.{n}" for n in range(3)), "outside the layers"]
    ours, theirs = (load_file(next(f.glob("*.safetensors"))) for f in (source, restored))
    for kind in ("alone", "cumulated"):
        for number in range(3):
            wanted = [number] if kind == "alone" else range(number + 1)
            mixed = shutil.copytree(source, tmp_path / f"{kind}{number}")
            names = tuple(f"model.layers.{layer}." for layer in wanted)
            tensors = {k: theirs[k] if k.startswith(names) else v for k, v in ours.items()}
            save_file(tensors, next(mixed.glob("*.safetensors")), {"format": "pt"})
            judged = evaluate(mixed, source, text).json["kl"]["mean"]
            assert rows[f"model.layers.{number}"][kind] == pytest.approx(judged, rel=1e-5)
    assert rows["outside the layers"]["cumulated"] == document["kl"]["mean"]


def test_the_figures_do_not_depend_on_batches(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the rounding of float32."""
    from fp4convert.calibration import samples, side_by_side

    source, artifact = make_pair(tmp_path)
    together = evaluate(artifact, source, text).json
    monkeypatch.setattr(samples, "BATCH_TOKENS", LENGTH)
    monkeypatch.setattr(side_by_side, "CHUNK_NBYTES", 8 * 32 * 5)
    apart = evaluate(artifact, source, text).json
    assert together["kl"].pop("windows") == pytest.approx(apart["kl"].pop("windows"), rel=1e-5)
    assert together["kl"] == pytest.approx(apart["kl"], rel=1e-5)
    assert together["ppl"] == pytest.approx(apart["ppl"], rel=1e-6)


def test_the_figures_do_not_depend_on_threads(tmp_path: Path, text: Path) -> None:
    """torch shares a product of this size among its threads; and rounds otherwise with fewer."""
    import torch

    source, artifact = make_model(tmp_path / "m", "Llama", hidden_size=512), tmp_path / "a"
    quantize(source, artifact)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(evaluate(artifact, source, text).json)
    finally:
        torch.set_num_threads(before)
    alone, shared = found
    assert alone["kl"].pop("windows") == pytest.approx(shared["kl"].pop("windows"), rel=1e-5)
    assert alone["kl"] == pytest.approx(shared["kl"], rel=1e-5)
    assert alone["ppl"] == pytest.approx(shared["ppl"], rel=1e-6)


def test_an_artifact_of_one_file_is_the_model_of_its_source(tmp_path: Path, text: Path) -> None:
    """Its config.json says how it is quantized, and nothing else."""
    source, out = make_model(tmp_path / "m", "Llama"), tmp_path / "q"
    file = tmp_path / "lone.safetensors"
    file.write_bytes((source / "model.safetensors").read_bytes())
    for place in (source, file):
        quantize(place, out / place.stem)
    found = evaluate(out / file.stem, source, text)
    assert found.code == 0, found.err
    assert found.json["kl"] == evaluate(out / source.name, source, text).json["kl"]
    config = out / file.stem / "config.json"
    config.write_text('{"hidden_size": 3}')
    message = evaluate(out / file.stem, source, text).json["error"]["message"]
    assert "Unrecognized model in config.json." in message


def test_another_model_is_refused(tmp_path: Path, text: Path) -> None:
    source = make_model(tmp_path / "m", "Llama")
    for number, (name, sizes) in enumerate(
        (("Qwen2", {}), ("Llama", {"num_hidden_layers": 2}), ("Llama", {"rms_norm_eps": 0.5}))
    ):
        other = make_model(tmp_path / f"other{number}", name, **sizes)
        refused = evaluate(other, source, text)
        assert (refused.code, refused.json["error"]["code"]) == (2, "evaluate-model")
        assert "--pad-for-tp" not in refused.json["error"]["next"]
    padded = make_model(tmp_path / "padded", "Llama", intermediate_size=1024)
    step = evaluate(padded, source, text).json["error"]["next"]
    assert "--pad-for-tp, evaluate the artifact" in step
    encoder = make_model(tmp_path / "bert", "Bert")
    refused = evaluate(encoder, encoder, text)
    assert (refused.code, refused.json["error"]["code"]) == (2, "evaluate-model")


def test_nan_is_refused_by_name(tmp_path: Path, text: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = make_model(tmp_path / "m", "Llama")
    broken = shutil.copytree(source, tmp_path / "b")
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    refused = evaluate(broken, source, text)
    assert (refused.code, refused.json["error"]["code"]) == (2, "evaluate-nan")
    assert "the artifact computes NaN" in refused.json["error"]["message"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_layers_of_neither_stay_in_memory(tmp_path: Path, text: Path) -> None:
    """Of 3 and of 18 layers, each of 38 MB in float32: the larger pair of models takes nothing like
    30 layers more.
    """
    sizes = {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        **{"num_key_value_heads": 12, "head_dim": 64},
    }
    peaks = []
    for count in (3, 18):
        source, artifact = tmp_path / f"m{count}", tmp_path / f"a{count}"
        make_model(source, "Llama", num_hidden_layers=count, **sizes)
        quantize(source, artifact)
        words = ["evaluate", artifact, "--source", source, "--text", text, "--json"]
        words += ["--sequence-length", LENGTH]
        command = [sys.executable, "-c", MEASURED, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        line = next(line for line in done.stderr.splitlines() if line.startswith("VmHWM"))
        peaks.append(int(line.split()[1]) * 1024)
    layer = 4 * (4 * 768 * 768 + 3 * 768 * 3072)
    print(f"layer {layer / 1e6:.0f} MB, peaks {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB")
    assert peaks[1] - peaks[0] < 8 * layer  # the artifact's file is mapped: 80 MB of it


def test_what_is_not_rounded_is_told(tmp_path: Path, text: Path) -> None:
    """FP8 layers of a mixed artifact, whose engines quantize activations to eight bits."""
    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    recipe = tmp_path / "r.toml"
    recipe.write_text('[[format]]\nmodules = ["*down_proj"]\nformat = "fp8"\n')
    quantize(source, artifact, "--recipe", recipe, "--activations", 4)
    named = ("--source", source, "--text", text, "--sequence-length", LENGTH)
    told = run("evaluate", artifact, *named)
    assert told.code == 0
    assert "3 linear layers have 8-bit activations in engines" in " ".join(told.err.split())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.sweep(2)
def test_every_dialect_says_the_same(fmt: str, tmp_path: Path, text: Path) -> None:
    """Of the same codes and block scales; a divisor as global scale is rounded once more."""
    source, found = make_model(tmp_path / "m", "GptOss", "bfloat16"), {}
    dialects = ("compressed-tensors", "quark", "plain")
    dialects += ("modelopt", "comfy") if fmt == "nvfp4" else ("gpt-oss", "mlx")
    for dialect in dialects:
        artifact = tmp_path / dialect
        quantize(source, artifact, "--format", fmt, "--dialect", dialect)
        found[dialect] = evaluate(artifact, source, text).json["kl"]["mean"]
    first = found["compressed-tensors"]
    assert first > 1e-3
    assert list(found.values()) == pytest.approx([first] * len(found), rel=1e-5)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_other_packed_weights_are_compared_too(kind: str, tmp_path: Path, text: Path) -> None:
    """As artifacts, beside the floats that they stand for."""
    from safetensors.torch import save_file

    source, artifact = (make_model(tmp_path / name, "Llama") for name in ("m", "a"))
    modules = [name.removesuffix(".weight") for name in read_tensors(source) if "_proj" in name]
    packing = fp8_blocks(16, 16) if kind == "fp8" else compressed("W4A16", "group", 32)
    worth = pack_checkpoint(artifact, [(packing, modules)])
    (artifact / "model.safetensors").unlink()
    twin = shutil.copytree(source, tmp_path / "twin")
    tensors = {name: tensor.float().contiguous() for name, tensor in worth.items()}
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    found, judged = (evaluate(each, source, text).json["kl"]["mean"] for each in (artifact, twin))
    assert found == pytest.approx(judged, rel=1e-5)
    assert found > 1e-5


def test_names_of_another_kind_are_refused(tmp_path: Path, text: Path) -> None:
    """GGUF has its own, which transformers' loader does not know."""
    pytest.importorskip("gguf")
    from gguf_donors import model, write_donor

    source = make_model(tmp_path / "m", "Llama")
    refused = evaluate(write_donor(tmp_path / "x.gguf", model()), source, text)
    assert (refused.code, refused.json["error"]["code"]) == (2, "gguf-config")
