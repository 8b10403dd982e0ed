"""The commands from Python: the command line's words, defaults, bytes and documents, and errors
that can be caught.
"""

import ast
import hashlib
import inspect as reflection
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import typer
from checkpoints import LAYER, read_folder, run, write_checkpoint, write_llama
from made_up_inputs import calibrate
from paths import ROOT
from pruned_deepseek import DEEPSEEK, calibrated, deepseek_shards

import fp4convert
from fp4convert.calibration.result import Calibrated
from fp4convert.cli.app import make_app
from fp4convert.cli.commands import COMMANDS
from fp4convert.commands import functions
from fp4convert.conversion import repacking
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.options.access import AccessOptions

OPTIONS = {  # command -> its options
    name: command.options for name, command in COMMANDS.items() if name in fp4convert.__all__
}
OF_SOURCE = {"source": "SOURCE"}
PRUNE = (
    "prune SOURCE -o OUT --calibration STATS --keep 4",
    {"output": "OUT", "calibration": "STATS", "keep": 4},
)
CALIBRATE = (
    "calibrate SOURCE -o OUT --self-generate 4",
    {"output": "OUT", "self_generate": 4},
)
DEQUANTIZE = ("dequantize ARTIFACT -o OUT", {"output": "OUT"})
TRANSCODE = (
    "transcode ARTIFACT -o OUT --dialect quark",
    {"output": "OUT", "dialect": "quark"},
)
COMPARE = ("compare ARTIFACT ARTIFACT --source SOURCE", OF_SOURCE)
SCREEN = {"json", "quiet", "verbose", "dry_run", "help"}  # what is shown, and how
LISTENERS = {"tell", "warn", "phases"}  # what Python alone can give


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


@pytest.mark.parametrize("command", OPTIONS)
def test_words_and_defaults_are_those_of_the_command_line(command):
    """Judged by typer's own parameters, and by Python's own signatures."""
    parameters = reflection.signature(getattr(fp4convert, command)).parameters
    options = {
        option.name: option
        for option in typer.main.get_command(make_app()).commands[command].params
    }
    python_only = LISTENERS | COMMANDS[command].hidden
    assert set(options) - SCREEN == set(parameters) - python_only
    for name in set(options) - SCREEN:
        default = parameters[name].default
        assert options[name].required == (default is reflection.Parameter.empty), name
        if not options[name].required:
            assert (options[name].default or None) == (default or None), name


@pytest.mark.parametrize("command", OPTIONS)
def test_docstrings_tell_every_option(command):
    """In the words that the command line has for it, and with its legal words."""
    words = reflection.getdoc(getattr(fp4convert, command))
    lines = re.sub(r"\n {4}(?=\S)", " ", words).splitlines()  # an option's own lines are one
    for option in typer.main.get_command(make_app()).commands[command].params:
        if option.name not in SCREEN:
            told = f"{option.name}: {option.help}"
            (line,) = [line for line in lines if line.startswith(told)]
            value = option.metavar or ""
            if value.startswith("[") and ":" not in value:
                assert set(value.strip("[]").split("|")) <= set(re.findall(r"[\w-]+", line))


def test_every_command_that_computes_has_its_function():
    tells = {"doctor", "recipes", "explain"}  # these show what is known
    assert set(COMMANDS) - tells == set(OPTIONS)
    assert all(getattr(functions, name) is getattr(fp4convert, name) for name in OPTIONS)


def test_the_artifact_of_a_bare_call_is_that_of_the_bare_command(source, tmp_path):
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "api")
    told = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "cli", "--json").json
    assert made.digest == told["digest"]
    assert made.as_json().keys() == told.keys()
    assert read_folder(tmp_path / "api") == read_folder(tmp_path / "cli")


def test_results_have_the_keys_of_their_documents(source, tmp_path):
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "out")
    file = calibrate(tmp_path / "c.safetensors", source)
    verified = [
        fp4convert.verify(made.output, source=source, calibration=given) for given in (None, file)
    ]
    calibrated = Calibrated(tmp_path / "c", 1, 2, 2, 3, 4, 5, ("a",), ("b", "c"), ("c",), "0f", 6.0)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    recorded = ("calibration, gram full", sha256)
    assert [(one.inputs, one.calibration) for one in verified] == [(None, None), recorded]
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
    names = getattr(value, "_fields", ())
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
    if names:
        told = {"phases", "tell", "named", "warn"}
        return {name: plain(getattr(value, name)) for name in names if name not in told}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "checkpoint"):
        return plain(value.checkpoint)
    return None if isinstance(value, fp4convert.Phases) or callable(value) else value


WORK = {  # what a command comes to -> the command line, and the words of the call
    "conversion.one_checkpoint.Conversion.carry_out": (
        "quantize SOURCE --format nvfp4",
        {"format": "nvfp4"},
    ),
    "conversion.repacking.dequantize": DEQUANTIZE,
    "conversion.repacking.transcode": TRANSCODE,
    "conversion.pruning.prune": PRUNE,
    "execution.finish.merge": ("merge ARTIFACT", {}),
    "quality.inspection.inspect": ("inspect ARTIFACT", {}),
    "quality.verification.verify_judged": ("verify ARTIFACT", {}),
    "quality.comparison.compare": COMPARE,
    "quality.analysis.analyze": ("analyze SOURCE", {}),
    "calibration.run.calibrate": CALIBRATE,
    "checkpoint.artifact.open_quantized": DEQUANTIZE,
    "checkpoint.artifact.open_artifact": TRANSCODE,
    "checkpoint.whole_model.open_model": PRUNE,
    "commands.quality.open_artifact": ("inspect ARTIFACT", {}),
    "commands.quality.open_original": ("inspect ARTIFACT --source SOURCE", OF_SOURCE),
    "commands.quality.open_model": ("analyze SOURCE", {}),
    "commands.calibration.open_model": CALIBRATE,
}


@pytest.mark.parametrize(
    ("work", "command", "words"),
    [
        *((work, *asked) for work, asked in WORK.items()),
        ("commands.quality.open_artifact", "verify ARTIFACT", {}),
        ("checkpoint.candidates.open_candidate", *COMPARE),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_said_is_what_the_command_line_does_not_say(
    work, command, words, source, tmp_path, monkeypatch
):
    """Both come to the opening and to the work with the same, where neither was told more than it
    needs.
    """
    monkeypatch.chdir(tmp_path)
    if command.startswith("prune"):
        source = write_checkpoint(tmp_path / "experts", deepseek_shards(), DEEPSEEK)
        calibrated(source)
    else:
        fp4convert.quantize(source, format="mxfp4", output="artifact")
    places = {"SOURCE": str(source), "ARTIFACT": "artifact", "OUT": "out"}
    places["STATS"] = "calibration.safetensors"

    def stop(*arguments: object) -> None:
        raise StoppedError(plain(arguments))

    monkeypatch.setattr(f"fp4convert.{work}", stop)
    name, reference, *rest = (places.get(word, word) for word in command.split())
    with pytest.raises(StoppedError) as by_command:
        run(name, reference, *rest)
    with pytest.raises(StoppedError) as by_call:
        getattr(fp4convert, name)(
            [reference, *rest[:1]] if name == "compare" else reference,
            **{word: places.get(str(value), value) for word, value in words.items()},
        )
    assert by_call.value.args == by_command.value.args


@pytest.mark.parametrize(
    "words",
    [
        {"dialect": "modelopt", "scale_rule": "amax", "activations": 4, "input_scale": 0.5},
        {"exclude": f"{LAYER}.mlp.*", "kv_cache": "fp8"},
        {"exclude": [f"{LAYER}.mlp.*", "re:.*o_proj"], "workers": 1, "device": "cpu"},
        {"target_bits": 6.0},
        {"via": "fp8", "exclude": "*o_proj", "scale_rule": "amax"},
    ],
)
def test_every_word_does_what_its_option_does(words, source, tmp_path):
    asked = ["quantize", source, "--format", "nvfp4", "--json"]
    for word, value in words.items():
        for one in value if isinstance(value, list) else [value]:
            asked += [f"--{word.replace('_', '-')}", str(one)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        words = {**words, "format": "nvfp4", "output": str(tmp_path / "api")}
        planned = fp4convert.preview_quantize(str(source), **words)
        made = fp4convert.quantize(str(source), **words)
    outcome = run(*asked, "-o", tmp_path / "cli")
    assert made.digest == outcome.json["digest"]
    told = run(*asked, "-o", tmp_path / "dry", "--dry-run").json
    assert json.loads(json.dumps(planned["tensors"])) == told["tensors"]
    lines, label = outcome.err.splitlines(), "warning: "
    said = [line.removeprefix(label) for line in lines if line.startswith(label)]
    assert [str(one.message) for one in warned] == said


def test_a_doubt_is_told_once_before_the_work_or_after_the_plan(source, tmp_path):
    (source / "modeling.py").write_bytes(b"pass")
    asked = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q", "--json")
    for more, count in ((["--dry-run"], 1), (["--dry-run", "-q"], 0), ([], 1)):
        assert run(*asked, *more).err.count("custom code") == count


def test_a_whole_round_from_python_is_that_of_the_command_line(source, tmp_path):
    made, other = tmp_path / "q", tmp_path / "other"
    fp4convert.quantize(source, format="mxfp4", output=made)
    described = fp4convert.inspect(made, source=source, full=True)
    shown = run("inspect", made, "--source", source, "--full", "--json").json
    assert json.loads(json.dumps(described)) == shown
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
    file = tmp_path / "c.safetensors"
    study = fp4convert.analyze(source, calibration=file, sample=0.001, exclude="*.mlp.*")
    words = ("--calibration", file, "--sample", 0.001, "--exclude", "*.mlp.*", "--json")
    shown = run("analyze", source, *words)
    assert json.loads(json.dumps(study)) == shown.json
    weighed = {"scale_rule": "importance", "calibration": file}
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
    doubts, prepare = ("a doubt \x1b[31m",), repacking.prepare_dequantize
    fp4convert.quantize(source, format="nvfp4", output=tmp_path / "q", warn=lambda lines: None)
    monkeypatch.setattr(Conversion, "warnings", doubts)
    monkeypatch.setattr(
        repacking, "prepare_dequantize", lambda *words: replace(prepare(*words), warnings=doubts)
    )
    call = getattr(fp4convert, name)
    words = (
        {"format": "nvfp4", "output": tmp_path / "q"}
        if name == "quantize"
        else {"output": tmp_path / "back"}
    )
    with pytest.warns(UserWarning, match=r"a doubt \\x1b\[31m") as warned:
        call(source if name == "quantize" else tmp_path / "q", **words)
    doubts = [one for one in warned if one.category is UserWarning]
    assert {one.filename for one in doubts} == {__file__}


def made(source: Path, out: Path) -> Path:
    fp4convert.quantize(source, format="nvfp4", output=out)
    return out


def filled(out: Path) -> Path:
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return out


def quantized(source: Path | str, output: Path, **words: object) -> object:
    return fp4convert.quantize(source, **{"format": "nvfp4", "output": output, **words})


ERRORS = {  # class and code -> calls
    ("InputError", "unknown-format"): [lambda m, out: quantized(m, out, format="int4")],
    ("InputError", "not-an-artifact"): [lambda m, out: fp4convert.inspect(m)],
    ("InputError", "no-source"): [
        lambda m, out: fp4convert.verify(made(m, out), min_sqnr=20),
        lambda m, out: quantized("", out),
    ],
    ("InputError", "no-plan"): [lambda m, out: fp4convert.merge(m)],
    ("InputError", "no-text"): [fp4convert.calibrate],
    ("InputError", "usage"): [
        lambda m, out: quantized(m, out, workers=-1),
        lambda m, out: fp4convert.inspect("org/name", memory=float("nan")),
    ],
    ("OutputError", "foreign-output"): [lambda m, out: quantized(m, filled(out))],
    ("DeviceError", "no-device"): [lambda m, out: quantized(m, out, device="cuda:9")],
}


@pytest.mark.parametrize(
    ("kind", "code", "call"), [(*known, call) for known, calls in ERRORS.items() for call in calls]
)
def test_errors_are_classes_with_a_code(kind, code, call, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(getattr(fp4convert, kind)) as caught:
        call(source, tmp_path / "out")
    assert isinstance(caught.value, fp4convert.Fp4Error)
    assert caught.value.code == code


@pytest.mark.parametrize("name", OPTIONS)
def test_an_unknown_word_is_a_type_error_before_anything_is_read(name):
    function = getattr(fp4convert, name)
    needed = [
        p.name for p in reflection.signature(function).parameters.values() if p.default is p.empty
    ]
    with pytest.raises(TypeError, match=rf"^{name}\(\) .*unexpected keyword argument 'scale_rul'$"):
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


@pytest.fixture(scope="module")
def type_checked(tmp_path_factory):
    """What mypy says of callers, by the settings of the package itself, whose cache `make test`
    has just filled.
    """
    folder = tmp_path_factory.mktemp("callers")
    (folder / "right.py").write_text(
        "import fp4convert, numpy\n"
        "r: fp4convert.Result = fp4convert.quantize('m', format='nvfp4', scale_rule='amax', "
        "exclude=['a'])\n"
        "q: fp4convert.Quantized = fp4convert.quantize_tensor(numpy.ones((1, 16), "
        "numpy.float32), format='nvfp4')\n"
        "ok: bool = fp4convert.verify('a', source='m', min_sqnr=18).passed\n"
    )
    (folder / "wrong.py").write_text(
        "import fp4convert\nfp4convert.quantize('m', format='nvfp4', scale_rul='amax', "
        "workers='2')\n"
    )
    (folder / "way.py").write_text(
        "import fp4convert\n"
        "from fp4convert.commands import convert\n"
        "from fp4convert.options.writing import QuantizeOptions\n"
        "from fp4convert.numerics.backends.base import Backend\n"
        "from fp4convert.numerics.formats import Format\n"
        "from fp4convert.recipes.recipe import Target\n"
        "def follow(asked: QuantizeOptions, target: Target, fmt: Format, backend: Backend) -> "
        "None:\n"
        "    reveal_type(convert.quantize)\n"
        "    reveal_type(asked.scale_rule)\n"
        "    reveal_type(target._replace(scale_rule=asked.scale_rule).scale_rule)\n"
        "    reveal_type(target.scale_rule)\n"
        "    reveal_type(target.rule_for(fmt))\n"
        "    reveal_type(backend.quantize_group)\n"
        "    fp4convert.quantize('m', format='nvfp4', scale_rule=3)\n"
    )
    check = [sys.executable, "-m", "mypy", *folder.glob("*.py")]
    return subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_callers_are_type_checked(type_checked):
    assert "right.py" not in type_checked
    assert 'wrong.py:2: error: Unexpected keyword argument "scale_rul"' in type_checked
    assert 'wrong.py:2: error: Argument "workers"' in type_checked


def test_a_type_checker_follows_an_option_to_the_kernel(type_checked):
    """From what a command calls to the backend: `scale_rule` is never Any on its way."""
    revealed = re.findall(r'Revealed type is "(.*)"', type_checked)
    assert [kind.replace("builtins.", "") for kind in revealed[1:5]] == [*["str | None"] * 3, "str"]
    assert "QuantizeOptions" in revealed[0]
    taken = [kind.partition("->")[0] for kind in revealed]  # what comes back is a document
    assert len(taken) == 6
    shape = "numpy.ndarray[tuple[Any, ...]"  # of what Given holds, which NumPy leaves open
    assert not any(re.search(r"\bAny\b", kind.replace(shape, "")) for kind in taken)
    assert 'Argument "scale_rule"' in type_checked


def test_the_source_of_an_artifact_has_a_revision_of_its_own():
    asked = AccessOptions(revision="of-the-artifact", token="hf_x").original_access()
    assert (asked.revision, asked.token) == (None, "hf_x")


def test_signatures_are_for_people():
    """Types alone, as somebody who asks for help sees them."""
    shown = str(reflection.signature(fp4convert.quantize))
    assert "scale_rule: str | None = None" in shown
    assert "Annotated" not in shown
    assert "Option(" not in shown


def test_the_first_of_two_bad_numbers_is_told(source, tmp_path):
    with pytest.raises(fp4convert.InputError, match="workers is -1"):
        fp4convert.quantize(
            source, format="nvfp4", output=tmp_path / "q", workers=-1, shard_index=9, num_shards=2
        )


def test_what_is_at_the_end_of_a_cell_is_one_line(source, tmp_path):
    made = fp4convert.quantize(source, format="nvfp4", output=tmp_path / "q")
    told = "nvfp4, 7 tensors quantized, 87.5 kB -> 50.0 kB, SQNR 21.77 dB on average"
    assert repr(made).startswith(f"<Result {tmp_path / 'q'}: {told}, digest {made.digest[:12]}")
    verified = fp4convert.verify(tmp_path / "q", source=source, min_sqnr=90)
    assert re.fullmatch(
        r"<Verified failed: 7 tensors measured, SQNR mean 21\.77 dB, SQNR least 21\.\d\d dB,"
        r"( error sqnr-low,){3} and 4 more>",
        repr(verified),
    )
    assert (
        repr(fp4convert.verify(tmp_path / "q"))
        == "<Verified no fault found, no gate was set: 0 tensors measured>"
    )


def test_words_without_names_and_numbers_as_text_are_told_by_name(source, tmp_path):
    with pytest.raises(TypeError, match=r"takes source without a name; .* NAME='nvfp4'"):
        fp4convert.quantize(source, "nvfp4")
    with pytest.raises(TypeError, match=r"quantize\(\) workers='4'; expected int"):
        fp4convert.quantize(source, format="nvfp4", workers="4")
    with pytest.raises(TypeError, match=r"min_sqnr='20'; expected float"):
        fp4convert.verify(source, min_sqnr="20")
    assert fp4convert.preview_quantize(source, format="nvfp4", input_scale="0.5", activations=4)


def test_functions_load_what_their_own_work_needs():
    """Naming the functions of convert loads nothing that converts, plans or reads."""
    listed = "print(*(name for name in sys.modules if name.startswith('fp4convert.')))"
    code = f"import sys\nimport fp4convert.commands.convert\n{listed}"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    packages = {name.split(".")[1] for name in loaded.stdout.split()}
    work = {"conversion", "planning", "execution", "storage", "calibration", "quality", "report"}
    assert packages & work == set()


def test_dir_lists_the_public_names_alone():
    names = [name for name in dir(fp4convert) if not name.startswith("__")]
    assert set(names) == set(fp4convert.__all__) - {"__version__"}
