"""What a report shows: the same numbers that verify prints and quantize recorded, and what is known
by whom.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import LAYER, read_folder, run, values_of, weight, write_llama, write_single
from rewriting import rewrite

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.numerics.codec import as_matrix
from fp4convert.numerics.matrices import InMemory
from fp4convert.quality.evaluation import UsualSqnr
from fp4convert.quality.verification import Gate, verify, verify_judged
from fp4convert.report.datasheet import (
    BINS,
    MOST_PANELS,
    PANEL,
    STORED,
    _count,
    count_values,
    make_datasheet,
)
from fp4convert.storage.local import LocalSource
from fp4convert.storage.open import open_source

ATTENTION, DOWN = f"{LAYER}.self_attn", f"{LAYER}.mlp.down_proj"
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "the source")


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    quantize(source, tmp_path / "artifact", "--scale-rule", "amax")
    return tmp_path / "artifact"


def sheet_of(folder: Path | str, source: Path | None = None, is_verified: bool = False) -> dict:
    """The document, as JSON brings it to a page."""
    opened, original = open_artifact(str(folder)), open_source(str(source)) if source else None
    verified = verify(opened, original, Gate()) if is_verified else None
    return json.loads(json.dumps(make_datasheet(opened, original, verified), allow_nan=False))


def test_the_numbers_are_those_that_verify_prints(source, artifact):
    shown = sheet_of(artifact, source, is_verified=True)
    printed = run("verify", artifact, "--source", source, "--json").json["tensors"]
    assert shown["evidence"]["how"] == "measured"
    assert shown["tensors"]["name"] == [tensor["name"] for tensor in printed]
    for key in ("sqnr_db", "mse", "max_abs", "cosine", "saturated", "zero"):
        assert shown["tensors"][key] == pytest.approx([tensor[key] for tensor in printed], rel=1e-4)
    assert set(shown["tensors"]["format"]) == {"nvfp4"}
    worst = sorted(range(len(printed)), key=lambda at: printed[at]["sqnr_db"])[:6]
    assert [one["tensor"] for one in shown["worst"]] == worst
    assert [one["codes"] for one in shown["worst"]] == [printed[at]["histogram"] for at in worst]


def test_the_colours_are_those_of_the_method(source, tmp_path):
    """What a rule usually keeps, and not another one: 1.3 dB less is as usual by amax."""
    for rule, db in (("mse", 21.8), ("amax", 20.5)):
        quantize(source, tmp_path / rule, "--scale-rule", rule)
        sheet = make_datasheet(open_artifact(str(tmp_path / rule)))
        assert sheet["usual"]["db"] == db
        assert sheet["usual"]["words"].startswith(f"nvfp4 by {rule} usually has {db} dB;")


def test_a_page_after_verify_reads_no_tensor_again(artifact, monkeypatch):
    opened = open_artifact(str(artifact))
    verified, judged = verify_judged(opened, None, Gate())
    for name in ("read", "read_range", "read_into"):
        monkeypatch.setattr(LocalSource, name, None)  # which nobody can call
    shown = make_datasheet(opened, None, verified, judged)
    assert shown["verdict"]["words"].endswith("; no fault found, no gate was set")
    assert {row["modules"]: row["agree"] for row in shown["groups"]["rows"]} == {
        f"{ATTENTION}.{{q,k,v}}_proj".replace(".0.", ".*."): 1,
        f"{LAYER}.mlp.{{gate,up}}_proj".replace(".0.", ".*."): 1,
    }


def test_the_page_says_that_codes_were_counted_where_they_were(hub, artifact):
    hub.add("org/artifact", artifact)
    told = {
        "verified": sheet_of(artifact, is_verified=True),
        "looked at": sheet_of(artifact),
        "on the Hub": sheet_of("org/artifact", is_verified=True),
    }
    assert {shown["evidence"]["how"] for shown in told.values()} == {"recorded"}
    words = {name: shown["evidence"]["words"] for name, shown in told.items()}
    assert [name for name in words if "counted the codes again" in words[name]] == ["verified"]


def test_without_a_source_the_numbers_are_those_that_were_recorded(artifact):
    recorded = json.loads((artifact / "quantization_report.json").read_text())
    for is_verified in (False, True):
        shown = sheet_of(artifact, is_verified=is_verified)
        assert shown["evidence"]["how"] == "recorded"
        by_name = dict(zip(shown["tensors"]["name"], shown["tensors"]["sqnr_db"], strict=True))
        assert by_name == pytest.approx(
            {one["name"]: one["sqnr_db"] for one in recorded["tensors"]}, rel=1e-4
        )
        assert all(one["values"] is None for one in shown["worst"])
        mean = f"{recorded['summary']['sqnr_db_mean']:.2f} dB"
        assert f"{mean} on average: usual for NVFP4 by amax" in shown["verdict"]["words"]


def test_where_nothing_is_known_the_sheet_says_so(artifact):
    (artifact / "quantization_report.json").unlink()
    shown = sheet_of(artifact)
    assert shown["evidence"]["how"] is None
    assert "verify ARTIFACT --source SOURCE" in shown["evidence"]["words"]
    assert not any((shown["tensors"]["name"], shown["stacks"], shown["places"], shown["worst"]))
    assert not [word for _, word in shown["tiles"] if "SQNR" in word]


def test_places_point_to_the_layer_and_the_module(source, artifact):
    shown = sheet_of(artifact, source)
    (stack,) = shown["stacks"]
    assert (stack["name"], stack["layers"]) == ("model.layers", ["0"])
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj"]
    mlp = ["gate_proj", "up_proj", "down_proj"]
    assert stack["modules"] == [
        *(f"self_attn.{leaf}" for leaf in leaves),
        *(f"mlp.{leaf}" for leaf in mlp),
    ]
    for at, name in enumerate(shown["tensors"]["name"]):
        s, layer, module, expert = shown["places"][4 * at : 4 * at + 4]
        assert (s, expert) == (0, -1)
        assert name == f"model.layers.{stack['layers'][layer]}.{stack['modules'][module]}.weight"


def test_experts_have_their_number_and_one_place(tmp_path):
    names = [
        f"{LAYER}.mlp.experts.{expert}.{leaf}.weight"
        for expert in (0, 1, 7)
        for leaf in ("gate_proj", "down_proj")
    ]
    source = write_single(
        tmp_path / "m",
        {name: weight(seed) for seed, name in enumerate(names)},
        {"model_type": "mixtral"},
    )
    quantize(source, tmp_path / "q")
    shown = sheet_of(tmp_path / "q")
    assert shown["stacks"][0]["modules"] == ["mlp.experts.*.gate_proj", "mlp.experts.*.down_proj"]
    assert sorted(shown["places"][3::4]) == [0, 0, 1, 1, 7, 7]


def test_the_tensors_of_the_smaller_of_many_stacks_stand_together_by_their_names(tmp_path):
    names = [
        f"part{letter}.layers.{layer}.up.weight"
        for letter in "abcdefghij"
        for layer in range(2 if letter in "ad" else 3)
    ]
    tensors = {name: weight(seed) for seed, name in enumerate(names)}
    source = write_single(tmp_path / "m", tensors, {"model_type": "unheard_of"})
    quantize(source, tmp_path / "q")
    stacks = sheet_of(tmp_path / "q")["stacks"]
    assert [stack["name"] for stack in stacks] == [*(f"part{x}.layers" for x in "bcefghij"), ""]
    assert (stacks[0]["layers"], stacks[0]["modules"]) == (["0", "1", "2"], ["up"])
    alone = [name.removesuffix(".weight") for name in names if name[4] in "ad"]
    assert (stacks[-1]["layers"], stacks[-1]["modules"]) == ([""], alone)


def test_scale_groups_are_counted_by_kind_and_a_differing_one_is_shown(source, artifact):
    rows = {
        row["modules"]: (row["groups"], row["agree"])
        for row in sheet_of(artifact)["groups"]["rows"]
    }
    assert rows == {
        "model.layers.*.self_attn.{q,k,v}_proj": (1, 1),
        "model.layers.*.mlp.{gate,up}_proj": (1, 1),
    }
    rewrite(
        artifact, SHARD, f"{ATTENTION}.v_proj.weight_global_scale", np.float32([123.0]).tobytes()
    )
    groups = sheet_of(artifact)["groups"]
    assert {row["modules"]: (row["groups"], row["agree"]) for row in groups["rows"]} == {
        "model.layers.*.self_attn.{q,k,v}_proj": (1, 0),
        "model.layers.*.mlp.{gate,up}_proj": (1, 1),
    }
    assert [dict(members)[f"{ATTENTION}.v_proj"] for members in groups["differing"]] == ["123"]


def test_the_verdict_is_a_sentence_beside_what_is_usual(source, artifact):
    """And nothing passes without a gate.  The usual figure: configs/usual_losses.toml."""
    mean = run("verify", artifact, "--source", source, "--json").json["summary"]["sqnr_db_mean"]
    verdict = sheet_of(artifact, source, is_verified=True)["verdict"]
    loss = f"{mean:.2f} dB on average: usual for NVFP4 by amax (20.5)"
    assert verdict == {"is_good": True, "words": f"{loss}; no fault found, no gate was set"}


@pytest.mark.parametrize(
    ("db", "word"), [(19.9, "low"), (20.0, "usual"), (23.6, "usual"), (23.7, "more than usual")]
)
def test_a_mean_is_judged_by_its_method(db, word):
    assert UsualSqnr("nvfp4", "mse", 21.8, 20.0).grade(db) == f"{word} for NVFP4 by mse (21.8)"


def test_findings_come_with_what_to_do(source, artifact):
    rewrite(artifact, SHARD, f"{DOWN}.weight_global_scale", np.float32([np.inf]).tobytes())
    shown = sheet_of(artifact, source, is_verified=True)
    assert (shown["verdict"]["is_good"], shown["verdict"]["words"][:6]) == (False, "failed")
    found = {finding["code"]: finding for finding in shown["findings"]}
    assert found["global-scale"]["tensor"] == DOWN
    assert found["global-scale"]["remedy"] == "Convert again."
    assert "infinite or NaN" in found["global-scale"]["meaning"]
    assert all(finding["remedy"] and finding["meaning"] for finding in found.values())


def test_findings_that_are_alike_share_a_line_as_on_the_terminal(source, artifact):
    """Seven tensors miss a gate: one line, with the worst, in both."""
    opened, original = open_artifact(str(artifact)), open_source(str(source))
    verified = verify(opened, original, Gate(min_sqnr_db=90))
    assert len(verified.findings) == 7
    (shown,) = make_datasheet(opened, original, verified)["findings"]
    worst = min(verified.tensors, key=lambda one: one.sqnr_db)
    assert (shown["lead"], shown["tensor"]) == ("7 of 7 tensors, the worst ", worst.name)
    assert shown["detail"].startswith(f"SQNR {worst.sqnr_db:.3f} dB")
    words = make_datasheet(opened, original, verified)["verdict"]["words"]
    assert words.startswith("failed: 7 errors; ")
    printed = run("verify", artifact, "--source", source, "--min-sqnr", 90).out.splitlines()
    line = f"{shown['level']} {shown['code']}: {shown['lead']}{shown['tensor']}: {shown['detail']}"
    assert line in printed


def test_what_is_not_finite_is_no_number_and_stands_first(source, artifact):
    rewrite(
        artifact, SHARD, f"{DOWN}.weight_global_scale", np.float32([0.0]).tobytes()
    )  # a divisor: every value is infinite
    shown = sheet_of(artifact, source, is_verified=True)
    at = shown["tensors"]["name"].index(f"{DOWN}.weight")
    assert (shown["tensors"]["sqnr_db"][at], shown["tensors"]["mse"][at]) == (None, None)
    assert shown["worst"][0]["tensor"] == at
    assert sum(shown["worst"][0]["values"]["artifact"]) < sum(shown["worst"][0]["values"]["source"])


def test_a_tensor_of_a_source_that_is_zero_stands_first(tmp_path):
    """It has lost all and has no SQNR, like those that have lost nothing."""
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(8)]
    exact = ("BF16", (32, 64), bytes(2 * 32 * 64))
    source = write_single(
        tmp_path / "source",
        {name: exact if at < 5 else weight(at) for at, name in enumerate(names)},
    )
    quantize(source, tmp_path / "out")
    rewrite(source, "model.safetensors", names[7], bytes(2 * 32 * 64))
    shown = sheet_of(tmp_path / "out", source, is_verified=True)
    assert shown["tensors"]["name"][shown["worst"][0]["tensor"]] == names[7]
    assert len(shown["worst"]) == 3  # the exact ones have lost nothing
    assert run("verify", tmp_path / "out", "--source", source).out.splitlines()[1].split()[:2] == [
        names[7],
        "-",
    ]


def test_no_path_of_this_machine_is_told(source, artifact, tmp_path):
    text = json.dumps(sheet_of(artifact, source, is_verified=True))
    assert "the source" in text
    assert str(tmp_path) not in text


def test_hidden_signs_are_shown_as_what_they_are(tmp_path):
    name = "a\u202eb\x07.o_proj.weight"
    source = write_single(tmp_path / "m", {name: weight(1)})
    quantize(source, tmp_path / "q")
    assert sheet_of(tmp_path / "q", source)["tensors"]["name"] == [r"a\u202eb\x07.o_proj.weight"]


def counted(values: np.ndarray, limit: float) -> list[int]:
    """Counts by arithmetic on each value: which of BINS equal parts of -limit..limit it lies in."""
    at = np.floor((values.ravel() + limit) / (2 * limit) * BINS).astype(int).clip(0, BINS - 1)
    return [int((at == part).sum()) for part in range(BINS)]


def test_histograms_count_the_values_of_both(source, artifact, tmp_path):
    assert run("dequantize", artifact, "-o", tmp_path / "plain", "--dtype", "fp32").code == 0
    name = f"{DOWN}.weight"
    x, y = (values_of(read_folder(folder)[name]) for folder in (source, tmp_path / "plain"))
    (found,) = count_values(open_artifact(str(artifact)), open_source(str(source)), [name]).values()
    limit = max(np.abs(x).max(), np.abs(y).max())
    assert (found["limit"], found["share"]) == (limit, 1)
    near = [
        np.abs(np.subtract(found["source"], counted(x, limit))),
        np.abs(np.subtract(found["artifact"], counted(y, limit))),
    ]
    assert sum(found["source"]) == sum(found["artifact"]) == x.size
    assert max(part.sum() for part in near) <= 4  # a value on an edge may round to either side


def test_values_beyond_the_largest_of_the_source_are_counted():
    theirs, ours = (
        InMemory(as_matrix(np.full((4, 16), value, np.float32))) for value in (1.0, 1.5)
    )
    found = _count(theirs, ours)
    assert (
        found["limit"],
        sum(found["source"]),
        sum(found["artifact"]),
        found["artifact"][-1],
    ) == (1.5, 64, 64, 64)


def test_of_a_large_matrix_rows_from_all_over_are_counted(tmp_path):
    rows, columns = 2 * MOST_PANELS * PANEL // 1024, 1024  # twice as many panels as are read
    data = np.zeros((rows, columns), np.float32)
    data[: rows // 2] = 1
    source = write_single(tmp_path / "m", {"o_proj.weight": ("F32", data.shape, data.tobytes())})
    quantize(source, tmp_path / "q")
    (found,) = count_values(
        open_artifact(str(tmp_path / "q")), open_source(str(source)), ["o_proj.weight"]
    ).values()
    assert found["share"] == 0.5
    assert (found["source"][BINS // 2], found["source"][-1]) == (
        rows * columns // 4,
        rows * columns // 4,
    )


def test_a_card_tells_what_stays_and_where_it_comes_from(source, artifact):
    shown = sheet_of(artifact, source)
    facts = dict(shown["facts"])
    told = (facts["dialect"], facts["scale rule"], facts["method"])
    assert told == ("compressed-tensors", "amax", "rtn")
    stored = {word for word, _ in shown["stored"]}
    assert {"global scale", "scale layout", "share read"} <= stored
    assert not {*STORED} & facts.keys()
    assert re.search(r"\blm_head\b", facts["kept"])
    assert re.search(r"\bmodel\.embed_tokens\b", facts["kept"])
    assert "layernorm" not in facts["kept"]
    assert shown["about"] == "made from a folder of weights"
    assert [form["block_size"] for form in shown["forms"]] == [16]
