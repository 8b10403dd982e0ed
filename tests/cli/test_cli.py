"""The command line: exit codes, one JSON document whatever happens, golden help, and nothing heavy
loaded before its time.
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from checkpoints import (
    LAYER,
    WAIT_SECONDS,
    run,
    run_alone,
    start,
    wait_until,
    weight,
    write_llama,
    write_single,
    write_zeros,
)
from paths import GOLDEN

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.cli import app, foreign_words
from fp4convert.recipes.options import PANELS

HELP = GOLDEN / "help"
COMMANDS = (
    *("quantize", "dequantize", "transcode", "merge", "push", "prune", "calibrate", "analyze"),
    *("evaluate", "inspect", "verify", "compare", "reproduce", "attest", "explain", "doctor"),
    "recipes",
)
HEAVY = (
    *("torch", "cupy", "transformers", "huggingface_hub", "httpx2"),
    *("compressed_tensors", "modelopt"),
)
UNNEEDED = ("pydantic", "numpy.ma", "rich")  # by words that are plain, for lines that are


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


@pytest.fixture
def artifact(source, tmp_path):
    assert run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "artifact").code == 0
    return tmp_path / "artifact"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_golden(command, monkeypatch):
    """After a change on purpose: COLUMNS=100 NO_COLOR=1 TERM=dumb fp4convert COMMAND --help all,
    read, and kept.
    """
    for name, value in (("COLUMNS", "100"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    ask = run_alone if command in ("", "quantize") else run
    outcome = ask(*command.split(), "--help", *(["all"] if command else []))
    assert (outcome.code, outcome.err) == (0, "")
    golden = (HELP / f"{command or 'fp4convert'}.txt").read_text(encoding="utf-8")
    assert [line.rstrip() for line in outcome.out.splitlines()] == golden.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_one_screen(command, monkeypatch):
    """What it leaves out is counted, and `--help all` has it."""
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = run(command, "--help").out, run(command, "--help", "all").out
    shown, known = (
        re.findall(r"^  (-\S.*?)(?=  |$)", text, re.MULTILINE) for text in (short, whole)
    )
    left = re.findall(rf"^(\d+) more options: .* {command} --help all$", short, re.MULTILINE)
    assert len(short.splitlines()) <= 45
    assert set(shown) <= set(known)
    assert left == ([str(len(known) - len(shown))] if short != whole else [])
    assert "--json" in " ".join(shown)


def test_words_before_and_behind_a_command(artifact, tmp_path):
    """Options of every command stand on either side; those of others name their command."""
    assert run("--json", "inspect", artifact).json == run("inspect", artifact, "--json").json
    assert run("-q", "verify", artifact).code == 0
    for words, step in (
        (("quantize", "x", "--scale-layout", "8x4"), "It is an option of fp4convert transcode."),
        (("upload", "x"), "fp4convert calls it push."),
        (
            ("reproduce", "x", "--force"),
            "It is an option of fp4convert quantize, dequantize, transcode, calibrate, prune, "
            "attest.",
        ),
    ):
        assert run(*words, "--json").json["error"]["next"] == step


def test_every_command_is_in_the_help():
    listed = (HELP / "fp4convert.txt").read_text(encoding="utf-8")
    assert {path.stem for path in HELP.iterdir()} == {"fp4convert", *COMMANDS}
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", listed)


def test_version():
    """It names the kernels that doctor names."""
    kernels = run("doctor", "--json").json["cpu"]["instruction_set"]
    for words in ("--version", "-V", "version"):
        outcome = run(words)
        assert outcome.code == 0
        assert outcome.out.startswith(f"fp4convert {version('fp4convert')} (CPU kernels: ")
        assert set(re.findall(r"\w[\w.-]*", kernels)) <= set(re.findall(r"\w[\w.-]*", outcome.out))


def test_no_command_shows_the_help_and_is_bad_usage():
    outcome = run()
    assert outcome.code == 2
    assert (outcome.out, outcome.err) == ("", run("--help").out)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_a_word_too(command):
    helped = run("help", *command.split())
    assert (helped.code, helped.err) == (0, "")
    assert helped.out == run(*command.split(), "--help").out == run(*command.split(), "-h").out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_page_has_an_example_that_is_not_flowed_into_the_text(command):
    page = (HELP / f"{command}.txt").read_text(encoding="utf-8")
    assert re.search(rf"\n\nExample:\n  fp4convert {command}\b", page)
    assert not re.search(r"<(str|int|float|list)|range>|\{", page)


def test_the_first_heading_has_the_most_wanted_and_twelve_at_most():
    page = (HELP / "quantize.txt").read_text(encoding="utf-8")
    headings = re.findall(r"^(\w[\w ]*):$", page, re.MULTILINE)
    assert headings == ["Arguments", *PANELS, "Example"]
    first = re.findall(r"^  (-.+?)(?=  |$)", page.partition("Quality:")[0], re.MULTILINE)
    formats = "--format [nvfp4|mxfp4|fp8|mxfp8]"
    assert first[:3] == [formats, "--for <engine>", "-o, --output <path>"]
    assert len(first) <= 12


def test_no_summary_is_cut():
    """A list of commands has room for 60 characters of each."""
    page = (HELP / "fp4convert.txt").read_text(encoding="utf-8")
    assert "..." not in page.replace("[ARGS]...", "")
    for command in COMMANDS:
        (told,) = re.findall(rf"^  {command}  +(\S.*)$", page, re.MULTILINE)
        assert len(told) <= 60


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", ["60", "80", "100"])
def test_a_page_fits_the_terminal(command, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    _, *lines = run(command, "--help").out.splitlines()  # the first names pytest
    assert max(map(len, lines)) <= int(width)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("quantize", "M", "--ignore", "lm_head"), "fp4convert calls it --exclude."),
        (("quantize", "M", "--modules_to_not_convert", "x"), "fp4convert calls it --exclude."),
        (("quantize", "--model", "M"), "Give the model without an option"),
        (
            ("quantize", "M", "--bits", "4"),
            "fp4convert calls it --format. Its words are nvfp4, mxfp4, fp8",
        ),
        (("quantize", "M", "--scheme", "NVFP4"), "fp4convert calls it --format."),
        (("quantize", "M", "--out", "x"), "fp4convert calls it --output."),
        (("quantize", "M", "--group-size", "16"), "The format decides it"),
        (("quantize", "M", "--exlude", "x"), "Did you mean --exclude?"),
        (("verify", "M", "--max_nmse", "1"), "Did you mean --max-nmse?"),
        (("inspect", "M", "--bits", "4"), "See: fp4convert inspect --help"),
        (("quantize", "M", "--frobnicate"), "See: fp4convert quantize --help"),
        (("transcode", "M", "--for", "vllm"), "fp4convert calls it --dialect. vLLM and SGLang"),
        (("transcode", "M", "--text", "x"), "It is an option of fp4convert quantize, evaluate,"),
        (("quantize", "M", "--imatrix", "x"), "fp4convert calls it --calibration."),
        (("convert", "M"), "fp4convert calls it quantize."),
        (("./M", "--format", "nvfp4"), "To convert it: fp4convert quantize ./M --format nvfp4"),
        (("inspekt", "M"), "Did you mean inspect?"),
        (("frobnicate",), "See: fp4convert --help"),
    ],
)
def test_words_of_other_tools_are_answered_and_none_misleads(words, told):
    outcome = run(*words, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "usage")
    assert outcome.json["error"]["next"].startswith(told)
    assert outcome.err.count("--") <= 2 + outcome.err.count("--help")


def test_an_option_that_is_missing_is_named_with_its_words():
    outcome = run("quantize", "M")
    assert outcome.err.startswith("error[usage]: Missing option --format [nvfp4|mxfp4|fp8|mxfp8]\n")
    for words, step in (
        (("dequantize", "M"), "Add -o <path>. See: fp4convert dequantize --help"),
        (("transcode", "M", "-o", "x"), "Add --dialect <name>. See: fp4convert transcode --help"),
    ):
        assert run(*words, "--json").json["error"]["next"] == step


def test_options_of_others_are_answered_with_options_that_exist():
    known = {
        flag for name in COMMANDS for flag in re.findall(r"--[\w-]+", run(name, "-h", "all").out)
    }
    assert set(foreign_words.OPTIONS) <= known
    assert set(foreign_words.COMMANDS) <= set(COMMANDS)
    theirs = [word for words in foreign_words.OPTIONS.values() for word in words.split()]
    assert all(word == word.lower() and "_" not in word for word in theirs)


def test_verbose_says_what_runs_and_how_long_every_step_took(source, tmp_path):
    told = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-v").err
    lines = told.splitlines()
    assert lines[0].startswith(f"fp4convert {version('fp4convert')}, Python ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["plan", "quantize", "whole command"]
    assert "peak memory" in lines[-1]
    for command in (("doctor",), ("explain", "usage"), ("recipes",)):
        assert "whole command: " in run(*command, "-v").err
        assert run(*command, "-q").err == ""
    assert run("inspect", tmp_path / "out", "-q", "-v").code == 2


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize",),
        ("quantize", "SOURCE"),
        ("quantize", "SOURCE", "--format"),
        ("quantize", "SOURCE", "--format", "int4"),
        ("quantize", "SOURCE", "--format", "NVFP5"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--dialect", "awq"),
        ("quantize", "SOURCE", "--format", "mxfp4", "--dialect", "modelopt"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--scale-rule", "even"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--device", "cuda"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--device", "tpu"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--workers", "-1"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--workers", "many"),
        ("quantize", "SOURCE", "--format", "nvfp4", "--exclude", "re:("),
        ("quantize", "SOURCE", "--format", "nvfp4", "--include", "re:["),
        ("quantize", "SOURCE", "--format", "nvfp4", "--no-such-option"),
        ("quantize", "SOURCE", "surplus", "--format", "nvfp4"),
        ("quantize", "absent", "--format", "nvfp4"),
        ("inspect",),
        ("inspect", "absent"),
        ("inspect", "SOURCE"),
        ("verify",),
        ("verify", "SOURCE"),
        ("verify", "ARTIFACT", "--min-sqnr", "20"),
        ("verify", "ARTIFACT", "--source", "absent"),
        ("verify", "ARTIFACT", "--source", "SOURCE", "--min-sqnr", "good"),
        ("dequantize", "ARTIFACT"),
        ("dequantize", "SOURCE", "-o", "OUT"),
        ("dequantize", "ARTIFACT", "-o", "OUT", "--dtype", "int8"),
        ("dequantize", "ARTIFACT", "-o", "OUT", "--device", "cuda:7"),
        ("prune", "SOURCE", "-o", "OUT", "--keep", "2"),
        ("prune", "SOURCE", "-o", "OUT", "--calibration", "absent", "--keep", "2"),
        ("no-such-command",),
        ("--no-such-option",),
    ],
)
def test_bad_usage_is_exit_2_one_document_and_nothing_written(
    arguments, source, artifact, tmp_path, monkeypatch
):
    places = {"SOURCE": str(source), "ARTIFACT": str(artifact), "OUT": str(tmp_path / "OUT")}
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    words = [places.get(word, word) for word in arguments]
    for outcome in (run(*words), run(*words, "--json")):
        assert outcome.code == 2
        assert outcome.err.startswith("error[")
    error = outcome.json["error"]
    assert set(error) == {"code", "exit", "message", "tensor", "next"}
    assert (error["exit"], bool(error["code"]), bool(error["message"])) == (2, True, True)
    assert run(*words).out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_json_is_one_document_on_stdout_for_every_command_that_ends_well(
    source, artifact, tmp_path
):
    commands = (
        ("quantize", source, "--format", "mxfp4", "-o", tmp_path / "out"),
        ("quantize", source, "--format", "mxfp4", "--dry-run"),
        ("inspect", artifact),
        ("verify", artifact, "--source", source),
        ("dequantize", artifact, "-o", tmp_path / "plain"),
    )
    for command in commands:
        outcome = run(*command, "--json")
        assert outcome.code == 0
        assert "error" not in outcome.json


def test_a_dry_run_has_exactly_the_promised_keys_and_writes_nothing(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json
    assert " ".join(document) == (
        "format dialect method calibration source_bytes output_bytes bits_per_weight added_bytes"
        " peak_memory_bytes peak_disk_bytes seconds_estimated patterns tensors left_out warnings"
        " unexplained"
    )
    assert " ".join(document["patterns"][0]) == (
        "pattern count action reason group format source_bytes output_bytes"
    )
    assert " ".join(document["tensors"][0]) == (
        "name action reason group source_bytes output_bytes"
    )
    assert len(document["tensors"]) == 11
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_dry_run_refuses_what_a_run_would_refuse(tmp_path, source):
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    outcomes = [
        run("quantize", source, "--format", "nvfp4", *extra)
        for extra in (("--dry-run",), ("-o", tmp_path / "q"))
    ]
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert outcomes[0].err == outcomes[1].err != ""
    assert not (tmp_path / "q").exists()


def test_findings_are_exit_6(artifact, source):
    (artifact / "config.json").unlink()
    assert run("inspect", artifact).code == 6
    assert run("verify", artifact).code == 6
    outcome = run("verify", artifact, "--json")
    assert (outcome.code, outcome.json["passed"]) == (6, False)


def test_dequantize_refuses_what_is_not_sound(artifact, tmp_path):
    (artifact / "config.json").unlink()
    outcome = run("dequantize", artifact, "-o", tmp_path / "plain", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "unsound-artifact")
    assert not (tmp_path / "plain").exists()


def test_fp16_refuses_what_it_cannot_hold(tmp_path):
    source = write_single(
        tmp_path / "m", {"x.o_proj.weight": ("BF16", (1, 16), b"\x80\x48" * 16)}
    )  # 2^18
    assert run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q").code == 0
    outcome = run("dequantize", tmp_path / "q", "-o", tmp_path / "out", "--dtype", "fp16", "--json")
    assert (outcome.code, outcome.json["error"]["tensor"]) == (2, "x.o_proj.weight")
    assert "65504" in outcome.json["error"]["message"]
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "ok", "--dtype", "bf16").code == 0


def modules_after(*arguments: object) -> set[str]:
    """Modules loaded when the command ends."""
    code = (
        "import sys\nfrom fp4convert.__main__ import main\ntry:\n    main()\nexcept SystemExit "
        "as stopped:\n"
        "    assert not stopped.code, stopped.code\nprint('\\nLOADED', *sorted(sys.modules))"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    return set(ended.stdout.rpartition("LOADED")[2].split())


def test_conversion_and_inspection_load_nothing_heavy(source, artifact, tmp_path):
    for arguments in (
        ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out"),
        ("quantize", source, "--format", "nvfp4", "--dry-run"),
        ("verify", artifact, "--source", source),
    ):
        assert modules_after(*arguments).isdisjoint(HEAVY), arguments


@pytest.mark.parametrize(
    ("words", "dialect"),
    [
        (("quantize", "--format", "nvfp4", "--dry-run"), "compressed_tensors"),
        (("quantize", "--format", "mxfp4", "--dialect", "quark", "--dry-run"), "quark"),
        (("inspect",), "compressed_tensors"),
    ],
)
def test_only_the_dialect_that_is_meant_is_loaded(words, dialect, source, artifact):
    command, *options = words
    loaded = modules_after(command, source if command == "quantize" else artifact, *options)
    names = {name.replace("-", "_") for name in DIALECTS}
    folder = "fp4convert.checkpoint.dialects."
    assert names & {name.removeprefix(folder) for name in loaded} == {dialect}


@pytest.mark.parametrize(
    "words", [("inspect",), ("verify",), ("quantize", "--format", "nvfp4", "--dry-run")]
)
def test_what_only_looks_does_not_load_what_typer_checks_values_with(words, source, artifact):
    command, *options = words
    place = source if command == "quantize" else artifact
    loaded = modules_after(command, place, *options)
    assert loaded.isdisjoint((*HEAVY, *UNNEEDED))
    assert ("safetensors" in loaded) is (command == "verify")  # which has it open every shard
    of_plans = {"planning.plan", "checkpoint.adapters.peft", "checkpoint.encodings.fp8"}
    assert command != "inspect" or of_plans.isdisjoint(name[11:] for name in loaded)


def test_plain_words_do_not_load_what_typer_checks_values_with(source, tmp_path):
    words = (
        *("--format", "nvfp4", "-o", tmp_path / "out", "--scale-rule", "amax", "--workers", "1"),
        *("--shard-index", "0", "--num-shards", "2", "--exclude", "*q_proj"),
        *("--exclude", "*k_proj", "-q"),
    )
    loaded = modules_after("quantize", source, *words)
    assert loaded.isdisjoint(
        (*HEAVY, *UNNEEDED, "html", "fp4convert.report.datasheet", "fp4convert.cli.draw_plan")
    )


@pytest.mark.parametrize("told", [None, "20"])
def test_threads_of_numpy_sleep_until_they_are_needed_unless_a_user_says_otherwise(told):
    code = (
        "import os\nfrom fp4convert.__main__ import main\ntry:\n    main()\nfinally:\n"
        "    print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"
    }
    environment |= {"OPENBLAS_THREAD_TIMEOUT": told} if told else {}
    command = [sys.executable, "-c", code, "--version"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    assert ended.stdout.split()[-1] == (told or "4")


def test_help_and_version_load_no_numpy():
    for arguments in (
        ("--help",),
        ("--version",),
        ("quantize", "--help"),
        ("verify", "--help"),
        ("explain", "--help"),
    ):
        assert modules_after(*arguments).isdisjoint(
            (*HEAVY, "numpy", "ml_dtypes", "pydantic", "rich")
        )


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_signals_end_the_command_with_their_code(options, number, code, tmp_path):
    source, out = write_zeros(tmp_path / "source"), tmp_path / "out"
    with start(
        "quantize", source, "--format", "mxfp4", "-o", out, "--workers", "1", *options
    ) as process:
        wait_until((out / ".fp4convert" / "plan.json").exists, process)
        process.send_signal(number)
        printed, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code
    assert "Traceback" not in told
    assert "interrupted" in told
    assert f"fp4convert quantize {source} --format mxfp4 -o {out}" in told
    assert not options or json.loads(printed)["error"]["exit"] == code


LOST = """
import os, signal, sys, time
import fp4convert.__main__
from fp4convert.cli import app as cli
class Cleared:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the exception comes here, and Python drops it
def app(args, standalone_mode):
    Cleared()
    time.sleep(3600)
cli.make_app = lambda called, is_list: app
fp4convert.__main__.main()
"""


def test_a_signal_that_comes_while_an_object_is_cleared_away_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", LOST],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 143
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_bug_of_ours(source):
    """fp4convert ... --dry-run --json | head -1"""
    source = write_single(
        source.parent / "many",
        {f"{LAYER}.x{number}.weight": weight(0, 1, 16) for number in range(3000)},
    )
    with start("quantize", source, "--format", "nvfp4", "--dry-run", "--json") as process:
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
        process.wait(timeout=WAIT_SECONDS)
    assert "Traceback" not in told
    assert "Exception ignored" not in told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_is_served(encoding, source, tmp_path):
    name = "mödel.漢.weight"
    source = write_single(tmp_path / "m", {name: weight()})
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "fp4convert", "quantize", source]
    command += ["--format", "nvfp4", "--dry-run"]
    ended = subprocess.run(
        command, capture_output=True, env=environment, check=False, timeout=WAIT_SECONDS
    )
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr


def test_the_module_runs_as_the_command():
    ended = subprocess.run(
        [sys.executable, "-m", "fp4convert", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith(f"fp4convert {version('fp4convert')} (CPU kernels: ")


def test_a_recipe_file_is_followed_and_a_wrong_one_is_bad_usage(source, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("base = 'mlp_only'\n[[keep]]\nreason = 'a trial'\nmodules = ['*.down_proj']")
    plan = run(
        "quantize", source, "--format", "nvfp4", "--recipe", recipe, "--dry-run", "--json"
    ).json
    reasons = {tensor["name"]: (tensor["action"], tensor["reason"]) for tensor in plan["tensors"]}
    assert reasons[f"{LAYER}.mlp.up_proj.weight"][0] == "quantize"
    assert reasons[f"{LAYER}.mlp.down_proj.weight"] == ("copy", "a trial")
    assert "mlp_only" in reasons[f"{LAYER}.self_attn.q_proj.weight"][1]
    for option, word in (
        ("--recipe", "nobody"),
        ("--stack-order", "oi"),
        ("--stack-rows", "mixed"),
    ):
        outcome = run("quantize", source, "--format", "nvfp4", option, word, "--dry-run", "--json")
        assert (outcome.code, outcome.json["error"]["exit"]) == (2, 2)
        assert word in outcome.json["error"]["message"]


@pytest.mark.parametrize("words", [("--", "inspect"), ("inspect",)])
def test_a_command_is_found_wherever_its_word_stands(words, artifact):
    assert run(*words, artifact).code == 0


@pytest.mark.parametrize("words", [("--token", "hf_secret"), ("--token=hf_secret",)])
def test_the_command_that_continues_has_no_token(words):
    assert app._without_token(["quantize", "m", *words, "-q"]) == ["quantize", "m", "-q"]
