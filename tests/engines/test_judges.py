"""What vLLM's and SGLang's own loaders hold is explained, and their judges see what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import weight, write_single
from engine_contents import without_fused_names
from families import FAMILIES
from family import Family
from judged_families import JUDGED, source
from paths import ROOT
from tiny_models import fp4convert, make_llama

from fp4convert.conversion.engine_choice import choose_options
from fp4convert.errors import InputError
from fp4convert.options.writing import QuantizeOptions

JUDGES = ROOT / "tests" / "engines" / "judges"
ARTIFACTS = ROOT / "build" / "engines"
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
pytestmark = pytest.mark.engine
needs_engines = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs `make engines`: no .venv-engines"
)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/judge_tables.py, which reads the results and their reasons."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("judge_tables")


def test_every_row_is_exact_or_explained(tables: Any) -> None:
    rows = [(page["engine"], row) for page in tables.pages() for row in page["rows"]]
    for engine, row in rows:
        assert bool(row["faults"]) == (row["outcome"] != "exact")
        assert "" not in tables.reasons(engine, row), row
    assert len(rows) >= 120


@pytest.mark.parametrize(
    "fault",
    [
        "ValueError: another",
        "AssertionError: ",
        "KeyError: 'model.layers.N.another' (another.py, load_weights)",
        "differs model.layers.N.self_attn.qkv_proj.weight torch.uint8 [1], artifact [2]",
        "unset model.layers.N.another",
        "unread model.layers.N.another",
        "nothing compared",
    ],
)
def test_no_reason_hides_another_fault(tables: Any, fault: str) -> None:
    for page in tables.pages():
        for row in page["rows"]:
            assert "" in tables.reasons(page["engine"], {**row, "faults": [*row["faults"], fault]})


def test_every_reason_is_of_some_fault(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pattern, too."""
    rows = [(page["engine"], row) for page in tables.pages() for row in page["rows"]]
    for known in tables.known_reasons():
        for says in known["says"]:
            alone = [{**known, "says": [says]}]
            monkeypatch.setattr(tables, "known_reasons", lambda alone=alone: alone)
            assert any(any(tables.reasons(engine, row)) for engine, row in rows), says


def test_the_table_of_engines_says_what_the_judges_saw(tables: Any) -> None:
    """Of every artifact that lies in build/engines, by the newest version."""
    from fp4convert import inspect

    if not ARTIFACTS.exists():
        pytest.skip("needs `make engines`: no build/engines")
    newest = {page["engine"]: page for page in reversed(tables.pages())}
    outcomes: dict[str, dict[str, bool]] = {}
    for engine, page in newest.items():
        for row in page["rows"]:
            kind = (row["family"], row["dialect"], row["format"], row["activations"])
            name = "--".join(map(str, (*kind, row["options"]))).removesuffix("--")
            outcomes.setdefault(name, {})[engine.lower()] = row["outcome"] == "exact"
    others = []
    for name, seen in outcomes.items():
        said = {each["engine"]: each for each in inspect(ARTIFACTS / name)["engines"]}
        others += [
            f"{name}: {engine} {'loads' if loads else 'does not load'} it; {said[engine]['why']}"
            for engine, loads in seen.items()
            if said[engine]["loads"] is not loads
        ]
    assert not others, "\n".join(others)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each.name in JUDGED], ids=str)
def test_what_is_chosen_for_a_judged_version_is_judged_exact(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where --for finds nothing, no artifact of that family is exact, either."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from judge_tables import pages

    model = source(family, tmp_path / "model")
    for page in pages():
        rows = [row for row in page["rows"] if row["family"] == family.name]
        exact = [row for row in rows if row["outcome"] == "exact"]
        asked = f"{page['engine']}:{page['version']}"
        chosen = chosen_for(model, asked)
        if not exact:
            assert chosen == ("engine-refuses",), asked
            continue
        keys = ("dialect", "format", "activations", "options")
        assert chosen in [tuple(row[key] for key in keys) for row in exact], asked


def chosen_for(model: Path, asked: str) -> tuple[object, ...]:
    """Dialect, format, activations and options that --for chooses, or the code of its error."""
    try:
        options = choose_options(QuantizeOptions(model, engine=asked))
    except InputError as error:
        return (error.code,)
    return (
        options.dialect,
        options.format,
        options.activations,
        (options.exclude and "kept") or "",
    )


def judged(judge: str, folders: list[Path], results: Path, **environment: str) -> list[str]:
    """What a judge says of every folder."""
    command = [str(PYTHON), str(JUDGES / f"{judge}.py"), str(results), *map(str, folders)]
    subprocess.run(command, check=False, env={**os.environ, **environment}, timeout=500)
    return [row["outcome"] for row in json.loads(results.read_text())["rows"]]


def changed(folder: Path, name: str, original: Path) -> Path:
    """A copy to be spoilt, of which the original's tensors are expected."""
    copy = Path(shutil.copytree(original, folder / name))
    row = {**json.loads(Path(f"{original}.json").read_text()), "tensors_of": str(original)}
    Path(f"{copy}.json").write_text(json.dumps(row))
    return copy


def spoil(folder: Path, tensor: str, change: Any) -> None:
    """Change one tensor in place."""
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors[tensor])
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def artifacts(tmp_path: Path) -> list[Path]:
    """An artifact, one with a nibble flipped, one with rows of scales exchanged, one whose record
    does not say what stays.
    """
    model = make_llama(tmp_path / "m", head_dim=64)
    good = tmp_path / "good"
    kept = ("--exclude", "*.down_proj")
    fp4convert("quantize", model, "--format", "nvfp4", *kept, "--output", good)
    row = {"family": "llama", "dialect": "compressed-tensors", "format": "nvfp4"}
    Path(f"{good}.json").write_text(json.dumps({**row, "activations": 16, "options": ""}))
    stem = "model.layers.1.mlp.gate_proj"

    def flip(packed: Any) -> None:
        packed[3, 5] ^= 0x10

    def exchange(scales: Any) -> None:
        import torch

        held = scales.view(torch.uint8)
        held[[3, 4]] = held[[4, 3]]

    flipped, exchanged = changed(tmp_path, "flipped", good), changed(tmp_path, "exchanged", good)
    spoil(flipped, f"{stem}.weight_packed", flip)
    spoil(exchanged, f"{stem}.weight_scale", exchange)
    unsaid = changed(tmp_path, "unsaid", good)
    config = json.loads((unsaid / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (unsaid / "config.json").write_text(json.dumps(config))
    return [good, flipped, exchanged, unsaid]


@needs_engines
@pytest.mark.slow
@pytest.mark.parametrize("judge", ["judge_vllm", "judge_sglang"])
def test_a_judge_passes_what_is_right_and_nothing_else(
    judge: str, artifacts: list[Path], tmp_path: Path
) -> None:
    (wheel,) = (ROOT / ".venv-engines").glob("sglang-*")
    said = judged(judge, artifacts, tmp_path / "said.json", PYTHONPATH=str(wheel))
    assert said[:3] == ["exact", "wrong", "wrong"]
    assert said[3] != "exact"


@needs_engines
@pytest.mark.slow
def test_sglang_needs_the_names_of_what_it_fuses(tmp_path: Path) -> None:
    """Of a class that does not say what it fuses; `inspect` says so without running it."""
    model = make_llama(tmp_path / "m", head_dim=64)
    kept = ("--exclude", "*.[qkv]_proj")
    folders = []
    for dialect, options in (("compressed-tensors", kept), ("modelopt", ("--target-bits", "6.5"))):
        ours = tmp_path / dialect
        fp4convert(
            *("quantize", model, "--dialect", dialect, "--format", "nvfp4", *options, "-o", ours)
        )
        row = {"family": "llama", "dialect": dialect, "format": "nvfp4"}
        Path(f"{ours}.json").write_text(json.dumps({**row, "activations": 16, "options": ""}))
        folders += [ours, without_fused_names(changed(tmp_path, f"{dialect}-apart", ours))]
    (wheel,) = (ROOT / ".venv-engines").glob("sglang-*")
    said = judged("judge_sglang", folders, tmp_path / "said.json", PYTHONPATH=str(wheel))
    assert [each == "exact" for each in said] == [True, False, True, False]
    assert [_loads_in_sglang(folder) for folder in folders] == [True, False, True, False]


def _loads_in_sglang(folder: Path) -> bool | None:
    from fp4convert import inspect

    (said,) = (each["loads"] for each in inspect(folder)["engines"] if each["engine"] == "sglang")
    return said


# Prints which names of a record's list vLLM's own matching keeps, after its class renamed the list.
VLLM_KEEPS = """
import json, sys
from types import SimpleNamespace
from vllm.model_executor.layers.quantization.compressed_tensors import utils as compressed
from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase as ModelOpt
from vllm.model_executor.layers.quantization.quark import utils as quark
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration as Whisper
dialect, listed, names = json.load(sys.stdin)
fused, listed = Whisper.packed_modules_mapping, Whisper.hf_to_vllm_mapper.apply_list(listed)
if dialect == "modelopt":
    config = SimpleNamespace(exclude_modules=listed, packed_modules_mapping=fused)
    kept = [name for name in names if ModelOpt.is_layer_excluded(config, name)]
else:
    matching = {"quark": quark, "compressed-tensors": compressed}[dialect]
    kept = [name for name in names if matching.should_ignore_layer(name, listed, fused)]
print("KEPT", json.dumps(kept))
"""


@needs_engines
@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "quark"])
def test_vllm_keeps_the_encoder_of_whisper_by_its_own_matching(
    dialect: str, tmp_path: Path
) -> None:
    """vLLM 0.33, models/whisper.py, make_layers: ".encoder.layers.0" and ".layers" once more."""
    parts = ("fc1", "fc2", *(f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")))
    decoder = (*parts, *(f"encoder_attn.{one}_proj" for one in ("q", "k", "v", "out")))
    names = [f"model.encoder.layers.0.{part}" for part in parts]
    names += [f"model.decoder.layers.0.{part}" for part in decoder]
    tensors = {f"{name}.weight": weight(at, 64, 64) for at, name in enumerate(names)}
    config = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    fmt = "mxfp4" if dialect == "quark" else "nvfp4"
    source, out = write_single(tmp_path / "m", tensors, config), tmp_path / "q"
    fp4convert("quantize", source, "--format", fmt, "--dialect", dialect, "-o", out)
    record = json.loads((out / "config.json").read_text())["quantization_config"]
    layers = (".encoder.layers.0.layers.", ".decoder.layers.0.layers.")
    own = ("mlp.fc1", "mlp.fc2", "self_attn.qkv_proj", "self_attn.out_proj")
    encoder = [layers[0] + part for part in own]
    other = [layers[1] + part for part in (*own, "encoder_attn.q_proj", "encoder_attn.kv_proj")]
    asked = [dialect, record.get("ignore", record.get("exclude")), [*encoder, *other]]
    (wheel,) = (ROOT / ".venv-engines").glob("vllm-0.33*")
    said = subprocess.run(
        [str(PYTHON), "-c", VLLM_KEEPS],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("KEPT")]
    assert json.loads(line.removeprefix("KEPT")) == encoder
