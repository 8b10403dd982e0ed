"""action.yml: its own steps, run by bash as a runner runs them, on a checkpoint; gates fail the
job, and nothing is uploaded.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from checkpoints import pack_shard, read_folder, read_shard, run, write_llama
from paths import ROOT

PLACE = ROOT / "deploy" / "action"
ACTION = yaml.safe_load((PLACE / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["id"]: step for step in ACTION["runs"]["steps"]}

FILES = ("GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY")


class Ended(NamedTuple):
    code: int
    log: str
    outputs: dict[str, str]


class Runner:
    """What a runner gives to the steps of a composite action: inputs by their defaults, files for
    outputs and the path.
    """

    def __init__(self, folder: Path, inputs: dict[str, str], **variables: str) -> None:
        self.folder = folder
        self.inputs = {
            name: inputs.pop(name, value.get("default", ""))
            for name, value in ACTION["inputs"].items()
        }
        assert not inputs, f"{inputs} are no inputs of the action"
        (folder / "temp").mkdir(exist_ok=True)
        files = {name: str(folder / name) for name in FILES}
        self.variables = {**os.environ, "RUNNER_TEMP": str(folder / "temp"), **files, **variables}

    def step(self, name: str) -> Ended:
        step = STEPS[name]
        assert step["shell"] == "bash"
        for file in FILES:
            (self.folder / file).write_text("")
        environment = {
            **self.variables,
            **{key: self.filled(value) for key, value in step["env"].items()},
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ended = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        lines = (self.folder / "GITHUB_OUTPUT").read_text().splitlines()
        added = (self.folder / "GITHUB_PATH").read_text().split()
        self.variables["PATH"] = os.pathsep.join([*added, self.variables["PATH"]])
        return Ended(
            ended.returncode,
            ended.stdout + ended.stderr,
            dict(line.split("=", 1) for line in lines),
        )

    def filled(self, value: str) -> str:
        """`${{ a || b }}` of inputs, the action's folder and variables."""

        def known(expression: re.Match[str]) -> str:
            return next(filter(None, map(self.word, expression[1].split("||"))), "")

        return re.sub(r"\$\{\{(.*?)\}\}", known, value)

    def word(self, name: str) -> str:
        context, _, key = name.strip().partition(".")
        return {
            "inputs": self.inputs,
            "github": {"action_path": str(PLACE)},
            "env": self.variables,
        }[context].get(key, "")


@pytest.fixture
def runner(tmp_path):
    """In which the action is installed as the package is here."""
    write_llama(tmp_path / "model")
    installed = str(Path(sys.executable).parent)

    def make(**inputs: str) -> Runner:
        words = {name.replace("_", "-"): value for name, value in inputs.items()}
        return Runner(
            tmp_path,
            {"source": "model", **words},
            PATH=os.pathsep.join([installed, os.environ["PATH"]]),
        )

    return make


def test_the_artifact_is_that_of_the_command_and_passes_its_gates(runner, tmp_path):
    job = runner(
        options="--dialect modelopt --exclude '*.mlp.*' --scale-rule amax",
        min_sqnr="15",
        max_nmse="0.05",
    )
    made, verified = job.step("quantize"), job.step("verify")
    assert (made.code, verified.code) == (0, 0), made.log + verified.log
    options = ("--dialect", "modelopt", "--exclude", "*.mlp.*", "--scale-rule", "amax")
    told = run(
        "quantize",
        tmp_path / "model",
        "--format",
        "nvfp4",
        *options,
        "-o",
        tmp_path / "q",
        "--json",
    ).json
    assert made.outputs == {"artifact": "artifact", "digest": told["digest"]}
    assert read_folder(tmp_path / "artifact") == read_folder(tmp_path / "q")
    least = run("verify", tmp_path / "q", "--source", tmp_path / "model", "--json").json["summary"][
        "sqnr_db_min"
    ]
    assert verified.outputs == {"sqnr-db-min": str(least)}
    assert verified.log.startswith("| artifact | passed |\n|---|---|\n")
    assert f"| SQNR, least | {least} dB (" in verified.log
    assert len(verified.log.splitlines()) < 20
    assert verified.log in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


@pytest.mark.parametrize("gate", [{"min_sqnr": "60"}, {"max_nmse": "1e-9"}])
@pytest.mark.sweep(2)
def test_a_gate_that_is_not_met_fails_the_job_and_says_what_was_found(gate, runner):
    job = runner(**gate)
    assert job.step("quantize").code == 0
    ended = job.step("verify")
    assert ended.code == 6
    assert float(ended.outputs["sqnr-db-min"]) > 15
    assert ended.log.startswith("| artifact | not passed |")
    assert "- error" in ended.log
    assert len(ended.log.splitlines()) < 32


def test_a_matrix_that_lost_nothing_is_not_the_worst(runner, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    for path in (tmp_path / "model").glob("*.safetensors"):
        held = read_shard(path)
        if name in held:
            dtype, shape, data = held[name]
            path.write_bytes(pack_shard({**held, name: (dtype, shape, bytes(len(data)))}))
    job = runner()
    assert job.step("quantize").code == 0
    log = job.step("verify").log
    report = run("verify", tmp_path / "artifact", "--source", tmp_path / "model", "--json").json
    known = [one for one in report["tensors"] if one["sqnr_db"] is not None]
    worst = min(known, key=lambda one: one["sqnr_db"])["name"]
    assert worst != name.removesuffix(".weight")
    assert f" dB ({worst}) |" in log


def test_findings_are_written_as_sarif_where_a_file_is_named(runner, tmp_path):
    job = runner(min_sqnr="60", sarif="found.sarif")
    assert job.step("quantize").code == 0
    assert job.step("verify").code == 6
    assert json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]


def test_an_artifact_that_is_damaged_fails_the_job(runner, tmp_path):
    job = runner()
    assert job.step("quantize").code == 0
    (shard,) = (tmp_path / "artifact").glob("model-00001*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert job.step("verify").code == 6


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"source": "absent"}, "absent"),
        ({"format": "int4"}, "int4"),
        ({"options": "--exclude 'a"}, "quote"),
        ({"options": "--dialect awq"}, "awq"),
        ({"format": "$(touch owned)"}, "$(touch owned)"),
        ({"options": "--recipe $(touch${IFS}owned) ; touch owned"}, ""),
    ],
)
def test_a_wrong_input_fails_the_job_and_is_never_run_by_the_shell(inputs, said, runner, tmp_path):
    ended = runner(**inputs).step("quantize")
    assert ended.code not in (0, 6)
    assert said in ended.log
    assert not ended.outputs
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "artifact").exists()


@pytest.mark.slow
def test_the_install_step_makes_an_environment_whose_command_comes_first(wheel, tmp_path):
    """Without a look at any index: pip's own variables keep it from fetching what the wheel
    needs.
    """
    job = Runner(
        tmp_path, {"source": "model", "package": str(wheel)}, PIP_NO_DEPS="1", PIP_NO_INDEX="1"
    )
    ended = job.step("install")
    assert ended.code == 0, ended.log
    assert job.variables["PATH"].startswith(f"{tmp_path}/temp/fp4convert/bin{os.pathsep}")
    assert (tmp_path / "temp" / "fp4convert" / "bin" / "fp4convert").exists()


@pytest.mark.parametrize("package", ["", "a wheel.whl"])
def test_without_a_package_the_actions_own_checkout_is_installed(package, tmp_path):
    """What the step tells pip: environments are made whose python only writes down its words."""
    python = tmp_path / "tools" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && cp "$0-made" "$3/bin/python"\n')
    made = python.with_name("python3-made")
    made.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > told\n")
    for file in (python, made):
        file.chmod(0o755)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    ended = Runner(tmp_path, {"source": "model", "package": package}, PATH=path).step("install")
    assert ended.code == 0, ended.log
    *words, told = (tmp_path / "told").read_text().splitlines()
    assert words[:3] == ["-m", "pip", "install"]
    assert told == package if package else Path(told).resolve() == ROOT


def test_inputs_reach_steps_as_variables_alone_and_every_one_is_used():
    used = re.findall(r"inputs\.([a-z-]+)", json.dumps([step["env"] for step in STEPS.values()]))
    assert set(used) == set(ACTION["inputs"])
    assert not [
        name
        for name, step in STEPS.items()
        if "${{" in step["run"] or set(step) - {"id", "shell", "env", "run"}
    ]
    for output in ACTION["outputs"].values():
        step, name = re.fullmatch(
            r"\$\{\{ steps\.(\w+)\.outputs\.([\w-]+) \}\}", output["value"]
        ).groups()
        assert f"{name}=" in STEPS[step]["run"]


def test_the_page_lists_every_input_with_its_default():
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    page = page.partition("## A GitHub Action")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| (.*?) ?\|$", page, re.MULTILINE))
    assert set(rows) == set(ACTION["inputs"])
    assert {name: rows[name] for name in ("format", "output")} == {
        name: ACTION["inputs"][name]["default"] for name in ("format", "output")
    }
    examples = [
        yaml.safe_load(text)["steps"] for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    ]
    uses = [next(step for step in steps if "source" in step.get("with", {})) for steps in examples]
    assert all(set(step["with"]) <= set(ACTION["inputs"]) for step in uses)
    # In another's repository "./" is not this one.
    assert [step["uses"] for step in uses] == [
        "OWNER/fp4convert/deploy/action@TAG",
        "./fp4convert/deploy/action",
    ]
    assert examples[1][1]["with"]["path"] == "fp4convert"
