"""The files of deploy/machines, each run as far as this machine can: their own commands with the
variables that a scheduler sets, a Hub on the loopback device, a Ray cluster of two nodes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from checkpoints import done, write_llama
from paths import ROOT

PLACE = ROOT / "deploy" / "machines"
FILES = sorted(PLACE.iterdir())
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("machines") / "m")


@pytest.fixture(scope="module")
def digest(model) -> str:
    return done("quantize", model, "--format", "nvfp4", "-o", model.parent / "q", "--json").json[
        "digest"
    ]


def start(words: list[object], cwd: Path, **variables: object) -> subprocess.Popen[str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    known |= {"PATH": f"{BIN}:{os.environ['PATH']}"} | {k: str(v) for k, v in variables.items()}
    return subprocess.Popen(
        list(map(str, words)), cwd=cwd, env=known, text=True, stdout=-1, stderr=subprocess.STDOUT
    )


def wait(processes: list[subprocess.Popen[str]]) -> None:
    ended = [(each.communicate(timeout=240)[0], each.returncode) for each in processes]
    assert [code for _, code in ended] == [0] * len(ended), ended


def check_digest(made: Path, digest: str, model: Path) -> None:
    """The artifact is whole, and its bytes are those of one process."""
    again = ("quantize", model, "--format", "nvfp4", "-o", made, "--num-shards", "1", "--json")
    assert done(*again).json["digest"] == digest
    assert done("verify", made, "--source", model, "--json").json["passed"] is not False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_short_and_begins_with_the_line_that_starts_it(file):
    lines = file.read_text("utf-8").splitlines()
    assert len(lines) <= 30
    starts = ("sbatch", "kubectl apply", "sky launch", "ray up", "hf jobs uv run")
    assert any(word in "\n".join(lines[:8]) for word in starts)


def test_the_job_of_the_hub_publishes_and_keeps_nothing(hub, model, digest, tmp_path):
    script = PLACE / "hf_job.py"
    block = re.search(r"^# /// script\n(.*?)^# ///$", script.read_text("utf-8"), re.M | re.S)[1]
    needs = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert needs == {
        "requires-python": project["requires-python"],
        "dependencies": [project["name"]],
    }
    hub.add("org/m", model)
    words = [sys.executable, script, "org/m", "me/q", "--format", "nvfp4"]
    wait([start(words, tmp_path, HF_HUB_DISABLE_XET=1)])
    files = hub.repos["me/q"].commits
    assert len(files) == 2  # the empty one, and all at once
    assert not list(tmp_path.rglob("*.safetensors"))
    made, here = (
        json.loads((folder / "quantization_config.json").read_text("utf-8"))["files"]
        for folder in (tmp_path / "result", model.parent / "q")
    )
    shards = [name for name in here if name.endswith(".safetensors")]
    assert shards
    assert all(made[name] == here[name] for name in shards)


def test_tasks_of_a_slurm_array_share_one_conversion(model, digest, tmp_path):
    text = (PLACE / "slurm.sh").read_text("utf-8")
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", text).groups())
    made, tasks = tmp_path / "q", range(first, last + 1)
    known = {"SLURM_CPUS_PER_TASK": 1, "SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_STEP": 1}
    words = ["bash", PLACE / "slurm.sh", model, made, "--memory", "1"]
    wait([start(words, tmp_path, SLURM_ARRAY_TASK_ID=k, **known) for k in tasks])
    check_digest(made, digest, model)


def test_pods_of_an_indexed_job_share_one_conversion(model, digest, tmp_path):
    job = yaml.safe_load((PLACE / "kubernetes.yaml").read_text("utf-8"))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert 'ENTRYPOINT ["fp4convert"]' in (ROOT / "deploy/docker/Dockerfile").read_text("utf-8")
    args = [
        {"ORG/NAME": str(model)}.get(word, word.replace("/work", str(tmp_path)))
        for word in container["args"]
    ]
    pods = range(job["completions"])
    wait([start(["fp4convert", *args], tmp_path, JOB_COMPLETION_INDEX=k) for k in pods])
    check_digest(tmp_path / "NAME-NVFP4", digest, model)


def test_nodes_of_skypilot_make_parts_that_merge(model, digest, tmp_path):
    task = yaml.safe_load((PLACE / "skypilot.yaml").read_text("utf-8"))
    (tmp_path / "fp4convert").mkdir()
    (tmp_path / "fp4convert" / "bin").symlink_to(BIN)
    lines = task["run"].replace("/parts", f"{tmp_path}/parts")
    known = {**task["envs"], "SOURCE": model, "HOME": tmp_path}
    nodes = range(task["num_nodes"])
    folders = [tmp_path / f"node{rank}" for rank in nodes]
    for folder in folders:
        folder.mkdir()
    sky = {"SKYPILOT_NUM_NODES": task["num_nodes"]}
    words = ["bash", "-euc", lines]
    wait([start(words, folders[k], SKYPILOT_NODE_RANK=k, **sky, **known) for k in nodes])
    done("merge", tmp_path / "parts" / "NAME-NVFP4")
    check_digest(tmp_path / "parts" / "NAME-NVFP4", digest, model)


@pytest.mark.engine
def test_a_ray_cluster_takes_the_file_and_runs_its_line(model, digest, tmp_path):
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_MEMORY_MONITOR="1")
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.cluster_utils import Cluster

    text = (PLACE / "ray.yaml").read_text("utf-8")
    validate_config(prepare_config(yaml.safe_load(text)))
    made = tmp_path / "q"
    words = shlex.split(shlex.split(re.search("# ray exec (.*)", text)[1])[1])
    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        cluster.add_node(**size)
        known = {"ORG/NAME": model, "/shared/NAME-NVFP4": made, "auto": cluster.address}
        wait([start([known.get(word, word) for word in words], tmp_path)])
    finally:
        cluster.shutdown()
    check_digest(made, digest, model)
