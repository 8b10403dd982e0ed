"""The commands from Python: the command line's words, defaults, bytes and documents, and errors that can be caught."""

import ast
import inspect as reflection
import json
import re
import subprocess
import sys
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from checkpoints import LAYER, read_folder, run, write_checkpoint, write_llama
from made_up_inputs import calibrate
from paths import ROOT
from pruned_deepseek import DEEPSEEK, calibrated, deepseek_shards

import fp4convert
from fp4convert.calibration.run import Calibrated
from fp4convert.cli.app import make_app
from fp4convert.commands import analysis, calibration, convert, quality
from fp4convert.commands.convert import QuantizeOptions
from fp4convert.commands.options import AccessOptions, PartOptions, WorkOptions, original_access
from fp4convert.conversion.requests import Request
from fp4convert.execution.settings import Settings
from fp4convert.storage.source import Access

WORDS = {  # command -> the function that does it, and the class of its further words
    "quantize": (convert.quantize, convert.QuantizeOptions),
    "dequantize": (convert.dequantize, convert.DequantizeOptions),
    "transcode": (convert.transcode, convert.TranscodeOptions),
    "prune": (convert.prune, convert.PruneOptions),
    "merge": (convert.merge, None),
    "inspect": (quality.inspect, quality.InspectOptions),
    "compare": (quality.compare, quality.CompareOptions),
    "verify": (quality.verify, quality.VerifyOptions),
    "analyze": (analysis.analyze, analysis.AnalyzeOptions),
    "calibrate": (calibration.calibrate, calibration.CalibrateOptions),
}
PRUNED = {"output": "OUT", "calibration": "STATS", "keep": 4}
GENERATED = {"output": "OUT", "self_generate": 4}
SCREEN = {"json", "quiet", "dry_run", "help"}  # what is shown, and how
PYTHON = {"tell", "warn", "phases", "memory", "transport"}  # of inspect and verify the last two


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


@pytest.mark.parametrize("command", WORDS)
def test_words_and_defaults_are_those_of_the_command_line(command):
    function, further = WORDS[command]
    parameters = reflection.signature(function).parameters
    known = {name: value.default for name, value in parameters.items() if name != "options"}
    extra = set(further.__annotations__) if further else set()
    options = {
        option.name: option
        for option in typer.main.get_command(make_app()).commands[command].params
    }
    assert set(options) - SCREEN - extra - set(known) == set()
    assert (set(known) | extra) - set(options) <= PYTHON
    for name, default in known.items():
        if name in options and default is not reflection.Parameter.empty:
            assert (options[name].default or None) == (default or None), name


@pytest.mark.parametrize("command", [command for command, (_, further) in WORDS.items() if further])
def test_defaults_that_docstrings_tell_are_those_of_the_command_line(command):
    """`default N` and `word (default)`, of whatever has a default there; options of None say in words what comes then."""
    further = WORDS[command][1]
    options = {
        option.name: option.default
        for option in typer.main.get_command(make_app()).commands[command].params
    }
    lines = [
        line.split(maxsplit=1) for kind in lineage(further) for line in kind.__doc__.splitlines()
    ]
    rows = {row[0]: row[1] for row in lines if len(row) == 2 and row[0] in options}
    for word, default in options.items():
        if word in further.__annotations__ and default not in (None, False):
            told = re.search(r"default (\d+)|(\S+) \(default", rows[word])
            assert type(default)(told[1] or told[2]) == default, word


def lineage(further: type) -> list[type]:
    """A class of words and those that it extends; TypedDict forgets them."""
    shared = (AccessOptions, WorkOptions, PartOptions, quality.InspectOptions)
    return [
        further,
        *(kind for kind in shared if kind.__annotations__.keys() <= further.__annotations__.keys()),
    ]


def test_every_command_that_computes_has_its_function():
    tells = {"doctor", "recipes", "explain"}  # these show what is known
    assert set(typer.main.get_command(make_app()).commands) - tells == set(WORDS)
    assert all(getattr(fp4convert, name) is function for name, (function, _) in WORDS.items())


def test_the_artifact_of_a_bare_call_is_that_of_the_bare_command(source, tmp_path):
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "api")
    told = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "cli", "--json").json
    assert made.digest == told["digest"]
    assert made.as_json().keys() == told.keys()
    assert read_folder(tmp_path / "api") == read_folder(tmp_path / "cli")


def test_results_have_the_keys_of_their_documents(source, tmp_path):
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "out")
    verified = [
        fp4convert.verify(made.output, source=source, outputs=outputs) for outputs in (False, True)
    ]
    calibrated = Calibrated(tmp_path / "c", 1, 2, 3, 4, 5, ("a",), ("b", "c"), ("c",), "0f", 6.0)
    assert [(one.inputs, one.calibration) for one in verified] == [(None, None), ("gaussian", None)]
    for one in (made, *verified, calibrated):
        document = one.as_json()
        named = {field.name for field in fields(one)}
        assert {key for key in named - document.keys() if getattr(one, key) is not None} == set()
        held = {key: getattr(one, key) for key in document.keys() - {"tensors", "findings"}}
        assert json.loads(json.dumps(held, default=str)) == {key: document[key] for key in held}


class StoppedError(Exception):
    """Raised where the work would begin, with all that it was given."""


def plain(value: object) -> object:
    """A value without who is told, and of sources and artifacts what they hold."""
    if is_dataclass(value) and not isinstance(value, type):
        told = {"phases", "tell", "named"}
        return {
            field.name: plain(getattr(value, field.name))
            for field in fields(value)
            if field.name not in told
        }
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return (
        plain(value.checkpoint)
        if hasattr(value, "checkpoint")
        else None
        if isinstance(value, fp4convert.Phases)
        else value
    )


@pytest.mark.parametrize(
    ("work", "command", "words"),
    [
        ("commands.convert.fulfil", "quantize SOURCE --format nvfp4", {"format": "nvfp4"}),
        ("commands.convert.repacking.dequantize", "dequantize ARTIFACT -o OUT", {"output": "OUT"}),
        (
            "commands.convert.repacking.transcode",
            "transcode ARTIFACT -o OUT --dialect quark",
            {"output": "OUT", "dialect": "quark"},
        ),
        (
            "commands.convert.pruning.prune",
            "prune SOURCE -o OUT --calibration STATS --keep 4",
            PRUNED,
        ),
        ("commands.convert.finish.merge", "merge ARTIFACT", {}),
        ("quality.inspection.inspect", "inspect ARTIFACT", {}),
        ("quality.verification.verify", "verify ARTIFACT", {}),
        (
            "quality.comparison.compare",
            "compare ARTIFACT ARTIFACT --source SOURCE",
            {"b": "ARTIFACT", "source": "SOURCE"},
        ),
        ("quality.analysis.analyze", "analyze SOURCE", {}),
        ("calibration.run.calibrate", "calibrate SOURCE -o OUT --self-generate 4", GENERATED),
        ("commands.convert.open_quantized", "dequantize ARTIFACT -o OUT", {"output": "OUT"}),
        (
            "commands.convert.open_artifact",
            "transcode ARTIFACT -o OUT --dialect quark",
            {"output": "OUT", "dialect": "quark"},
        ),
        (
            "commands.convert.open_source",
            "prune SOURCE -o OUT --calibration STATS --keep 4",
            PRUNED,
        ),
        ("commands.quality.open_artifact", "inspect ARTIFACT", {}),
        (
            "commands.quality.open_original",
            "inspect ARTIFACT --source SOURCE",
            {"source": "SOURCE"},
        ),
        ("commands.quality.open_artifact", "verify ARTIFACT", {}),
        (
            "commands.quality.open_artifact",
            "compare ARTIFACT ARTIFACT --source SOURCE",
            {"b": "ARTIFACT", "source": "SOURCE"},
        ),
        ("commands.analysis.open_source", "analyze SOURCE", {}),
        (
            "commands.calibration.open_source",
            "calibrate SOURCE -o OUT --self-generate 4",
            GENERATED,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_said_is_what_the_command_line_does_not_say(
    work, command, words, source, tmp_path, monkeypatch
):
    """Both come to the opening and to the work with the same, where neither was told more than it needs."""
    monkeypatch.chdir(tmp_path)
    if command.startswith("prune"):
        source = write_checkpoint(tmp_path / "experts", deepseek_shards(), DEEPSEEK)
        calibrated(source)
    else:
        fp4convert.quantize(source, format="mxfp4", output="artifact")
    places = {
        "SOURCE": str(source),
        "ARTIFACT": "artifact",
        "OUT": "out",
        "STATS": "calibration.safetensors",
    }

    def stop(*arguments: object) -> None:
        raise StoppedError(plain(arguments))

    monkeypatch.setattr(f"fp4convert.{work}", stop)
    name, reference, *rest = (places.get(word, word) for word in command.split())
    with pytest.raises(StoppedError) as by_command:
        run(name, reference, *rest)
    with pytest.raises(StoppedError) as by_call:
        getattr(fp4convert, name)(
            reference, **{word: places.get(str(value), value) for word, value in words.items()}
        )
    assert by_call.value.args == by_command.value.args


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ({"dialect": "modelopt", "scale_rule": "amax", "activations": 4, "input_scale": 0.5}, None),
        ({"exclude": f"{LAYER}.mlp.*", "kv_cache": "fp8"}, None),
        ({"exclude": [f"{LAYER}.mlp.*", "re:.*o_proj"], "workers": 1, "device": "cpu"}, None),
        ({"target_bits": 6.0}, None),
        ({"via": "fp8", "keep_packed": True, "memory": 0.5}, None),
    ],
)
def test_every_word_does_what_its_option_does(words, options, source, tmp_path):
    options = []
    for word, value in words.items():
        for one in value if isinstance(value, list) else [value]:
            options += [f"--{word.replace('_', '-')}", *([] if one is True else [str(one)])]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        planned = fp4convert.preview_quantize(
            str(source), format="nvfp4", output=tmp_path / "api", **words
        )
        made = fp4convert.quantize(
            str(source), format="nvfp4", output=str(tmp_path / "api"), **words
        )
    outcome = run(
        "quantize", source, "--format", "nvfp4", "-o", tmp_path / "cli", *options, "--json"
    )
    assert made.digest == outcome.json["digest"]
    told = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "dry",
        *options,
        "--dry-run",
        "--json",
    ).json
    assert json.loads(json.dumps(planned["tensors"])) == told["tensors"]
    said = [
        line.removeprefix("warning: ")
        for line in outcome.err.splitlines()
        if line.startswith("warning: ")
    ]
    assert [str(one.message) for one in warned] == said


def test_a_doubt_is_told_once_before_the_work_or_after_the_plan(source, tmp_path):
    asked = (
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--exclude",
        "absent",
        "-o",
        tmp_path / "q",
        "--json",
    )
    for more, count in ((["--dry-run"], 1), (["--dry-run", "-q"], 0), ([], 1)):
        assert run(*asked, *more).err.count("'absent' matches no module") == count


def test_a_whole_round_from_python_is_that_of_the_command_line(source, tmp_path):
    made, other = tmp_path / "q", tmp_path / "other"
    fp4convert.quantize(source, format="mxfp4", output=made)
    described = fp4convert.inspect(made, source=source, full=True)
    assert (
        json.loads(json.dumps(described))
        == run("inspect", made, "--source", source, "--full", "--json").json
    )
    report = fp4convert.verify(made, source=source, min_sqnr=10, max_nmse=0.1)
    assert report.passed
    shown = run(
        "verify", made, "--source", source, "--min-sqnr", 10, "--max-nmse", 0.1, "--json"
    ).json
    assert json.loads(json.dumps(report.as_json())) == shown
    assert not fp4convert.verify(made, source=source, min_sqnr=60).passed
    fp4convert.transcode(made, other, dialect="quark")
    assert fp4convert.inspect(other)["dialect"] == "quark"
    fp4convert.dequantize(other, tmp_path / "back", dtype="fp32")
    assert run("dequantize", made, "-o", tmp_path / "values", "--dtype", "fp32", "-q").code == 0
    assert read_folder(tmp_path / "back") == read_folder(tmp_path / "values")


def test_parts_and_merge(source, tmp_path):
    whole = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "whole")
    heard: list[str] = []
    for index in range(2):
        part = {"shard_index": index, "num_shards": 2, "tell": heard.append}
        assert (
            fp4convert.quantize(source, format="nvfp4", output=tmp_path / "parts", **part).digest
            is None
        )
    assert heard[0].startswith("this process does part 0 of 2")
    assert fp4convert.merge(tmp_path / "parts")["digest"] == whole.digest


def test_analysis_and_calibration_files(source, tmp_path):
    calibrate(tmp_path / "c.safetensors", source, "diag")
    study = fp4convert.analyze(
        source, calibration=tmp_path / "c.safetensors", sample=0.001, exclude="*.mlp.*"
    )
    shown = run(
        "analyze",
        source,
        "--calibration",
        tmp_path / "c.safetensors",
        "--sample",
        0.001,
        "--exclude",
        "*.mlp.*",
        "--json",
    )
    assert json.loads(json.dumps(study)) == shown.json
    weighed = {"scale_rule": "importance", "calibration": tmp_path / "c.safetensors"}
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "q", **weighed)
    assert made.scale_rule == "importance"


def test_progress_is_told(source, tmp_path):
    lines: list[str] = []
    phases = fp4convert.Phases(lambda line, tensor: lines.append(line))
    fp4convert.quantize(source, format="nvfp4", output=tmp_path / "q", phases=phases)
    phases.end()
    assert [meter.verb for meter in phases.meters][:2] == ["plan", "quantize"]


@pytest.mark.parametrize("name", ["quantize", "dequantize"])
def test_doubts_are_pythons_warnings_where_the_caller_stands(name, source, tmp_path, monkeypatch):
    """As a person would see them: nothing in them acts on a terminal."""
    monkeypatch.setattr("fp4convert.commands.convert.unused", lambda device: ["a doubt \x1b[31m"])
    fp4convert.quantize(source, format="nvfp4", output=tmp_path / "q", warn=lambda lines: None)
    call = getattr(fp4convert, name)
    words = (
        {"format": "nvfp4", "output": tmp_path / "q"}
        if name == "quantize"
        else {"output": tmp_path / "back"}
    )
    with pytest.warns(UserWarning, match=r"a doubt \\x1b\[31m") as warned:
        call(source if name == "quantize" else tmp_path / "q", **words)
    assert {one.filename for one in warned} == {__file__}


@pytest.mark.parametrize(
    ("kind", "code", "call"),
    [
        (
            fp4convert.InputError,
            "unknown-format",
            lambda source, out: fp4convert.quantize(source, format="int4", output=out),
        ),
        (fp4convert.InputError, "not-an-artifact", lambda source, out: fp4convert.inspect(source)),
        (
            fp4convert.InputError,
            "no-source",
            lambda source, out: fp4convert.verify(made(source, out), min_sqnr=20),
        ),
        (fp4convert.InputError, "no-plan", lambda source, out: fp4convert.merge(source)),
        (fp4convert.InputError, "no-text", fp4convert.calibrate),
        (
            fp4convert.InputError,
            "no-source",
            lambda source, out: fp4convert.quantize("", format="nvfp4", output=out),
        ),
        (
            fp4convert.InputError,
            "usage",
            lambda source, out: fp4convert.quantize(source, format="nvfp4", output=out, workers=-1),
        ),
        (
            fp4convert.InputError,
            "usage",
            lambda source, out: fp4convert.inspect(source, memory=float("nan")),
        ),
        (
            fp4convert.OutputError,
            "foreign-output",
            lambda source, out: fp4convert.quantize(source, format="nvfp4", output=filled(out)),
        ),
        (
            fp4convert.DeviceError,
            "no-device",
            lambda source, out: fp4convert.quantize(source, format="nvfp4", device="cuda:9"),
        ),
    ],
)
def test_errors_are_classes_with_a_code(kind, code, call, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        call(source, tmp_path / "out")
    assert isinstance(caught.value, fp4convert.Fp4Error)
    assert caught.value.code == code


def made(source: Path, out: Path) -> Path:
    fp4convert.quantize(source, format="nvfp4", output=out)
    return out


def filled(out: Path) -> Path:
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return out


@pytest.mark.parametrize("name", [name for name, (_, further) in WORDS.items() if further])
def test_an_unknown_word_is_a_type_error_before_anything_is_read(name):
    function = WORDS[name][0]
    needed = [
        p.name
        for p in reflection.signature(function).parameters.values()
        if p.default is p.empty and p.name != "options"
    ]
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale_rul'"):
        function(**dict.fromkeys(needed, "absent"), scale_rul="mse")


def test_names_for_type_checkers_are_those_that_are_there():
    (block,) = (
        node
        for node in ast.parse((ROOT / "fp4convert" / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    typed = {
        alias.name: part.module.removeprefix("fp4convert.")
        for part in block.body
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
    }
    assert typed == fp4convert._HOME
    assert set(typed) | {"__version__"} == set(fp4convert.__all__) <= set(dir(fp4convert))


def test_callers_are_type_checked(tmp_path):
    """By the settings of the package itself, whose cache `make test` has just filled."""
    (tmp_path / "right.py").write_text(
        "import fp4convert, numpy\n"
        "r: fp4convert.Result = fp4convert.quantize('m', format='nvfp4', scale_rule='amax', exclude=['a'])\n"
        "q: fp4convert.Quantized = fp4convert.quantize_tensor(numpy.ones((1, 16), numpy.float32), format='nvfp4')\n"
        "ok: bool = fp4convert.verify('a', source='m', min_sqnr=18).passed\n"
    )
    (tmp_path / "wrong.py").write_text(
        "import fp4convert\nfp4convert.quantize('m', format='nvfp4', scale_rul='amax', workers='2')\n"
    )
    check = [sys.executable, "-m", "mypy", tmp_path / "right.py", tmp_path / "wrong.py"]
    told = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert "right.py" not in told
    assert 'wrong.py:2: error: Unexpected keyword argument "scale_rul"' in told
    assert 'wrong.py:2: error: Argument "workers"' in told


READ_BY_NAME = {  # options of quantize that no field has: _order and what it calls ask for them by their words
    *(
        "ray",
        "push_to_hub",
        "private",
        "report",
        "target_size",
        "target_bits",
        "force",
        "join",
        "shard_index",
    ),
    *("num_shards", "warn", "memory"),
}


def test_no_option_of_quantize_is_forgotten_on_its_way():
    """Every word is a field of what is asked for, of how to work or of where from, or it is asked for by its name."""
    carried = {field.name for kind in (Request, Settings, Access) for field in fields(kind)}
    words = set(get_type_hints(QuantizeOptions))
    assert words - carried == READ_BY_NAME


def test_the_source_of_an_artifact_has_a_revision_of_its_own():
    asked = original_access({"revision": "of-the-artifact", "token": "hf_x"})
    assert (asked.revision, asked.token) == (None, "hf_x")
