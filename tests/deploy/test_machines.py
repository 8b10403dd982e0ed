"""The files of deploy/machines, each run as far as this machine can: their own commands with the
variables that a scheduler sets, a Hub on the loopback device, a Ray cluster of two nodes.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from checkpoints import done, read_folder, write_llama
from paths import ROOT

PLACE = ROOT / "deploy" / "machines"
TEXTS = {file.name: file.read_text("utf-8") for file in sorted(PLACE.iterdir())}
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    source = write_llama(tmp_path_factory.mktemp("machines") / "m")
    done("quantize", source, "--format", "nvfp4", "-o", source.with_name("q"))
    return source


def run_together(words: list[object], folders: list[Path], **variables: list[object]) -> None:
    """Run a command once in each folder, at the same time; variables differ from one to another."""
    started = []
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        known = {key: str(values[number]) for key, values in variables.items()}
        known = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **known}
        command = list(map(str, words))
        started.append(
            subprocess.Popen(command, cwd=folder, env=known, text=True, stdout=-1, stderr=-2)
        )
    ended = [(each.communicate(timeout=240)[0], each.returncode) for each in started]
    assert [code for _, code in ended] == [0] * len(folders), ended


def check(made: Path, model: Path) -> None:
    """The artifact is whole, and its bytes are those of one process."""
    assert read_folder(made) == read_folder(model.with_name("q")) != {}
    assert done("inspect", made, "--json").json["healthy"] is not False


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_file_is_short_and_begins_with_the_line_that_starts_it(text):
    assert len(text.splitlines()) <= 30
    assert re.search("sbatch|kubectl apply|sky launch|ray up|hf jobs uv run", text[:500])


def test_the_job_of_the_hub_publishes_and_keeps_nothing(hub, model, tmp_path):
    block = re.search(r"^# /// script\n(.*?)^# ///$", TEXTS["hf_job.py"], re.M | re.S)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert tomllib.loads(re.sub("^# ?", "", block, flags=re.M)) == {
        "requires-python": project["requires-python"],
        "dependencies": [project["name"]],
    }
    hub.add("org/m", model)
    words = [sys.executable, PLACE / "hf_job.py", "org/m", "me/q", "--format", "nvfp4"]
    run_together(words, [tmp_path], HF_HUB_DISABLE_XET=[1])
    assert len(hub.repos["me/q"].commits) == 2  # the empty one, and all at once
    assert not list(tmp_path.rglob("*.safetensors"))


def test_tasks_of_a_slurm_array_share_one_conversion(model, tmp_path):
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", TEXTS["slurm.sh"]).groups())
    tasks = range(first, last + 1)
    known = {"SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_STEP": 1, "SLURM_CPUS_PER_TASK": 1}
    variables = {key: [value] * len(tasks) for key, value in known.items()}
    words = ["bash", PLACE / "slurm.sh", model, tmp_path / "q", "--memory", "1"]
    run_together(words, [tmp_path] * len(tasks), SLURM_ARRAY_TASK_ID=tasks, **variables)
    check(tmp_path / "q", model)


def test_pods_of_an_indexed_job_share_one_conversion(model, tmp_path):
    job = yaml.safe_load(TEXTS["kubernetes.yaml"])["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert 'ENTRYPOINT ["fp4convert"]' in (ROOT / "deploy/docker/Dockerfile").read_text("utf-8")
    places = {"ORG/NAME": model, "/work/NAME-NVFP4": tmp_path / "q"}
    words = ["fp4convert", *(places.get(word, word) for word in container["args"])]
    pods = range(job["completions"])
    run_together(words, [tmp_path] * len(pods), JOB_COMPLETION_INDEX=pods)
    check(tmp_path / "q", model)


def test_nodes_of_skypilot_make_parts_that_merge(model, tmp_path):
    task = yaml.safe_load(TEXTS["skypilot.yaml"])
    (tmp_path / "fp4convert").mkdir()
    (tmp_path / "fp4convert" / "bin").symlink_to(BIN)
    nodes = range(task["num_nodes"])
    known = {**task["envs"], "SOURCE": model, "HOME": tmp_path, "SKYPILOT_NUM_NODES": len(nodes)}
    variables = {key: [value] * len(nodes) for key, value in known.items()}
    words = ["bash", "-euc", task["run"].replace("/parts", f"{tmp_path}/parts")]
    folders = [tmp_path / f"node{rank}" for rank in nodes]
    run_together(words, folders, SKYPILOT_NODE_RANK=nodes, **variables)
    done("merge", tmp_path / "parts" / "NAME-NVFP4")
    check(tmp_path / "parts" / "NAME-NVFP4", model)


@pytest.mark.engine
def test_a_ray_cluster_takes_the_file_and_runs_its_line(model, tmp_path):
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_MEMORY_MONITOR="1")
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.cluster_utils import Cluster

    text = TEXTS["ray.yaml"]
    validate_config(prepare_config(yaml.safe_load(text)))
    words = shlex.split(shlex.split(re.search("# ray exec (.*)", text)[1])[1])
    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        cluster.add_node(**size)
        known = {"ORG/NAME": model, "/shared/NAME-NVFP4": tmp_path / "q", "auto": cluster.address}
        run_together([known.get(word, word) for word in words], [tmp_path])
    finally:
        cluster.shutdown()
    check(tmp_path / "q", model)
