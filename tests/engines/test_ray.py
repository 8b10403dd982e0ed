"""A Ray cluster of four nodes on this machine: the bytes are those of one process, also when a node
dies meanwhile.
"""

import json
import os
import signal
import struct
import threading

import pytest
from checkpoints import (
    WAIT_SECONDS,
    bf16,
    pack_header,
    read_folder,
    run,
    start,
    wait_until,
    write_llama,
)
from diffusion import write_wan
from fakehub import TOKEN
from hub_cases import expect

from fp4convert.execution.leases import Leases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

STATE = ".fp4convert"
SHARDS = 40


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Forty shards that take a while, with scale groups that cross from each to the next; random
    rows at the head of zeros.
    """
    folder, shape = tmp_path_factory.mktemp("ray") / "layers", (4096, 4096)
    nbytes = 2 * shape[0] * shape[1]
    folder.mkdir()
    for number in range(SHARDS):
        names = f"layers.{number}.mlp.up_proj.weight", f"layers.{number + 1}.mlp.gate_proj.weight"
        header = {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [k * nbytes, (k + 1) * nbytes]}
            for k, name in enumerate(names)
        }
        with (folder / f"model-{number:02}.safetensors").open("wb") as out:
            out.write(pack_header(json.dumps(header).encode()))
            start = out.tell()
            for k in range(2):
                out.seek(start + k * nbytes)
                out.write(bf16(16, 4096, seed=2 * number + k))
            out.truncate(start + 2 * nbytes)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def expected(layers, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    return run("quantize", layers, "--format", "nvfp4", "-o", out, "--json", "-q").json["digest"]


@pytest.fixture
def cluster():
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DISABLE_MEMORY_MONITOR="1",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.others = [cluster.add_node(**size) for _ in range(3)]
    yield cluster
    cluster.shutdown()


def on_cluster(cluster, layers, out, *options):
    return start(
        "quantize",
        layers,
        "--format",
        "nvfp4",
        "-o",
        out,
        "--json",
        "--ray",
        cluster.address,
        "--workers",
        "1",
        *options,
    )


def wait_for_shards(out, process):
    wait_until(lambda: len(list((out / STATE / "done").glob("*"))) > 3, process)


@pytest.mark.slow
def test_four_nodes_and_one_that_is_killed_give_the_same_digest(
    cluster, layers, expected, tmp_path
):
    out = tmp_path / "out"
    with on_cluster(cluster, layers, out) as process:
        wait_for_shards(out, process)
        done = len(list((out / STATE / "done").iterdir()))
        threading.Thread(
            target=cluster.remove_node, args=(cluster.others[1],), kwargs={"allow_graceful": False}
        ).start()
        text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert 0 < done < SHARDS
    assert "is lost" in err
    assert json.loads(text)["digest"] == expected
    assert json.loads(text)["output"] == str(out)
    assert list((out / STATE / "tmp").iterdir()) == []
    again = on_cluster(cluster, layers, out)
    assert json.loads(again.communicate(timeout=120)[0])["digest"] == expected


@pytest.mark.slow
def test_given_global_scales_reach_every_node(cluster, tmp_path, monkeypatch):
    """By a name that means nothing in the folders where workers run."""
    monkeypatch.chdir(tmp_path)
    source = write_llama(tmp_path / "m")
    small = ("quantize", source, "--format", "nvfp4", "--json", "-q", "-o")
    assert run(*small, "first", "--dialect", "modelopt").code == 0
    scales = {
        name.removesuffix(".weight_scale_2"): struct.unpack("<f", data)[0] / 2
        for name, (_, _, data) in read_folder(tmp_path / "first").items()
        if name.endswith(".weight_scale_2")
    }
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    given = ("--global-scale", "scales.json")
    alone = run(*small, tmp_path / "alone", *given).json
    assert alone["saturated"] == len(scales)
    with on_cluster(cluster, source, tmp_path / "out", *given) as process:
        text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = json.loads(text)
    assert (found["digest"], found["saturated"]) == (alone["digest"], alone["saturated"])


@pytest.mark.slow
def test_what_is_wrong_is_told_as_by_one_process(cluster, layers, tmp_path):
    with on_cluster(cluster, layers, tmp_path / "out", "--device", "cuda:9") as process:
        text, _ = process.communicate(timeout=120)
    assert (process.returncode, json.loads(text)["error"]["exit"]) == (2, 2)
    assert "device" in json.loads(text)["error"]["code"]


def test_a_cluster_that_is_not_there_is_refused_before_anything_is_written(layers, tmp_path):
    with start(
        "quantize",
        layers,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "--json",
        "--ray",
        "127.0.0.1:1",
    ) as process:
        text, err = process.communicate(timeout=120)
    assert (process.returncode, json.loads(text)["error"]["code"]) == (2, "no-ray"), err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupt_ends_driver_and_workers_and_the_command_continues(
    cluster, layers, expected, tmp_path
):
    out = tmp_path / "out"
    with on_cluster(cluster, layers, out) as process:
        wait_for_shards(out, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, err
    assert "Continue with: fp4convert quantize" in err
    assert "--ray" in err
    wait_until(
        lambda: not Leases(out / STATE / "claims").others()
    )  # one that Ray killed leaves a claim, and nobody at work
    assert len(list((out / STATE / "done").iterdir())) < SHARDS
    assert not (out / "quantization_config.json").exists()
    assert (
        run("quantize", layers, "--format", "nvfp4", "-o", out, "--json", "-q").json["digest"]
        == expected
    )


@pytest.mark.slow
def test_workers_ask_the_hub_that_this_process_asks(cluster, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # engines are kept from asking a hub
    folder = write_llama(tmp_path / "m")
    hub.add("org/m", folder, is_private=True)
    expected = expect(hub, folder, tmp_path / "alone")
    with start(
        "quantize",
        "org/m",
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "--json",
        "--ray",
        cluster.address,
    ) as process:
        text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(text)["digest"] == expected
    assert TOKEN not in text + err


@pytest.mark.slow
def test_a_pipeline_is_done_by_all_nodes_component_by_component(cluster, tmp_path):
    source = write_wan(tmp_path / "wan")
    expected = run(
        "quantize", source, "--format", "nvfp4", "-o", tmp_path / "alone", "--json", "-q"
    ).json["digest"]
    with on_cluster(cluster, source, tmp_path / "out") as process:
        text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(text)
    assert (result["digest"], len(result["components"])) == (expected, 2)


def test_a_pipeline_for_a_cluster_that_is_not_there_writes_nothing(tmp_path):
    source = write_wan(tmp_path / "wan")
    outcome = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "--json",
        "--ray",
        "127.0.0.1:1",
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-ray")
    assert not (tmp_path / "out").exists()
