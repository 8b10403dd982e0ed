"""--device auto: a GPU where the plan says that it wins, and one line that says why.

Rates are typed here; whether a GPU really has them no test can tell.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import run, write_llama
from simt_gpu import Machine

from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import Floats
from fp4convert.conversion import device_choice
from fp4convert.conversion.device_choice import (
    MOST_SAMPLES,
    SAMPLE_WEIGHTS,
    Choice,
    choose_device,
    hashed_bytes_per_second,
    weights_per_second,
)
from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends import gpu_choice, gpus, open_backend, self_check
from fp4convert.recipes.recipe import Target

RATES = {"amax": 1.5e9, "mse": 0.4e9}  # weights a second of a core


def work_of(weights: float, rule: str = "mse") -> tuple[Target, list[Linear]]:
    """What `choose_device` is told of a plan that rounds so many weights."""
    linear = Linear("m", (int(weights) // 4096, 4096), Floats("bf16"), ())
    return Target("nvfp4", scale_rule=rule), [linear]


class NoCupy:
    """Fails where CuPy is imported."""

    def find_spec(self, name: str, *_: object) -> None:
        assert name.partition(".")[0] not in ("cupy", "cupy_backends"), name


@pytest.fixture
def cores(monkeypatch):
    """A machine with one GPU; set its cores, and have their rates."""

    def have(count: int) -> None:
        monkeypatch.setattr(device_choice, "processors", lambda: count)
        monkeypatch.setattr(
            device_choice,
            "weights_per_second",
            lambda backend, target, *_: count * RATES[target.scale_rule],
        )

    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), 1, ""))
    have(4)
    return have


@pytest.fixture
def without_cupy(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("cupy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoCupy(), *sys.meta_path])


@pytest.fixture
def sound(monkeypatch):
    gpu = SimpleNamespace(number=0)
    monkeypatch.setattr(gpu_choice, "survey_sound", lambda: gpus.Survey((13, 0), 1, gpus=(gpu,)))


def test_other_devices_stay(without_cupy):
    for device in ("cpu", "cuda", "cuda:3"):
        assert choose_device(device, *work_of(1e12)) == Choice(device)


def test_without_a_gpu_nothing_is_said_nor_measured(monkeypatch, without_cupy):
    monkeypatch.setattr(device_choice, "weights_per_second", None)
    for found in ((None, 0, "there is no NVIDIA driver"), ((13, 0), 0, gpus.NO_GPU)):
        monkeypatch.setattr(gpus, "ask_driver", lambda found=found: found)
        assert choose_device("auto", *work_of(1e12)) == Choice("cpu")
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), 0, "the driver refuses to start"))
    assert choose_device("auto", *work_of(1e12)) == Choice(
        "cpu", "the CPU is used: the driver refuses to start"
    )


def test_a_small_model_pays_for_neither_cupy_nor_a_measurement(cores, monkeypatch, without_cupy):
    monkeypatch.setattr(device_choice, "weights_per_second", None)
    chosen = choose_device("auto", *work_of(22 << 20))
    assert chosen.device == "cpu"
    assert chosen.reason.endswith("weights are too few; --device cuda uses cuda:0")


@pytest.mark.parametrize(
    ("weights", "rule", "count", "device"),
    [
        (70e9, "mse", 4, "cuda:0"),  # 44 s against 5 + 14
        (70e9, "mse", 16, "cpu"),  # 11 s against 5 + 14
        (70e9, "amax", 4, "cpu"),  # 12 s
        (70e9, "amax", 2, "cpu"),  # 23 s against 5 + 14: less, but not by the margin
        (4e9, "mse", 4, "cpu"),  # 2.5 s against 5 + 0.8
    ],
)
def test_the_gpu_must_win(weights, rule, count, device, cores, sound):
    cores(count)
    chosen = choose_device("auto", *work_of(weights, rule))
    assert chosen.device == device
    assert f"{rule} takes" in chosen.reason
    assert f"on {count} cores" in chosen.reason
    assert chosen.reason.startswith(f"device {device}: ")
    assert ("--device cuda uses cuda:0" in chosen.reason) == (device == "cpu")


def test_no_timing_chooses_the_bytes_of_gptq(cores, monkeypatch, without_cupy):
    """docs/methods.md: a GPU gives it other bytes; nothing is measured."""
    monkeypatch.setattr(device_choice, "weights_per_second", None)
    target, rounded = work_of(70e9)
    chosen = choose_device("auto", target._replace(method="gptq"), rounded)
    assert chosen == Choice(
        "cpu",
        "device cpu: a GPU gives gptq other bytes, which no timing may choose;"
        " --device cuda uses cuda:0",
    )
    assert choose_device("cuda", target._replace(method="gptq"), rounded) == Choice("cuda")


def test_fp8_is_chosen_as_four_bits_are(cores, sound, without_cupy):
    """A GPU rounds FP8 and MXFP8, too: nothing of them is left to the CPU."""
    for fmt in ("fp8", "mxfp8"):
        target, rounded = work_of(70e9)
        target = target._replace(format=fmt)
        assert choose_device("cuda", target, rounded) == Choice("cuda")
        assert choose_device("auto", target, rounded).device == "cuda:0"


def test_a_gpu_that_loses_costs_no_cupy(cores, without_cupy):
    cores(16)
    assert choose_device("auto", *work_of(70e9, "amax")).device == "cpu"


def test_a_gpu_that_wins_must_pass_the_check(cores, monkeypatch):
    refused = (("cuda:0", "cuda:0 gives other bytes"),)
    found = gpus.Survey((13, 0), 1, refused=refused, problem=refused[0][1], next_step="Look.")
    monkeypatch.setattr(gpu_choice, "survey_sound", lambda: found)
    assert choose_device("auto", *work_of(70e9)) == Choice(
        "cpu", "the CPU is used: cuda:0 gives other bytes. Look."
    )


def test_the_line_is_told_and_stands_in_the_dry_run(cores, tmp_path):
    source = write_llama(tmp_path / "m")
    words = ("quantize", source, "--format", "nvfp4")
    said = "weights are too few; --device cuda uses cuda:0"
    seconds = run(*words, "--dry-run", "--json").json["seconds_estimated"]
    assert (seconds["device"], said in seconds["device_reason"]) == ("cpu", True)
    assert said in run(*words, "--dry-run").out.replace("\n", " ")
    outcome = run(*words, "-o", tmp_path / "q", "--json")
    assert (outcome.json["device"], outcome.err.count(said)) == ("cpu", 1)
    assert run(*words, "--device", "cpu", "-o", tmp_path / "p").err.count(said) == 0


def test_auto_takes_a_gpu_that_wins(simt_libraries, tmp_path, monkeypatch):
    made = Machine(simt_libraries)
    made.install(monkeypatch)
    for name in ("LEAST_WEIGHTS", "BEGIN_SECONDS", "COPY_SECONDS", "LINK_SECONDS"):
        monkeypatch.setattr(device_choice, name, 0)
    words = ("quantize", write_llama(tmp_path / "m"), "--format", "nvfp4", "-o", tmp_path / "q")
    outcome = run(*words)
    assert "on cuda:0" in outcome.out
    assert "device cuda:0: mse takes" in outcome.err
    assert made.launches


def test_a_target_size_is_measured_where_the_plan_says(simt_libraries, tmp_path, monkeypatch):
    """Few weights: the CPU, and nothing of CuPy; where the GPU wins, it, and two lines say so."""
    source = write_llama(tmp_path / "m")
    words = ("quantize", source, "--format", "nvfp4", "--target-bits", 6, "--json")
    made = Machine(simt_libraries)
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), 1, ""))
    monkeypatch.setitem(sys.modules, "cupy", None)
    small = run(*words, "-o", tmp_path / "cpu")
    assert small.err.count("weights are too few") == 1
    made.install(monkeypatch)
    for name in ("LEAST_WEIGHTS", "BEGIN_SECONDS", "COPY_SECONDS", "LINK_SECONDS"):
        monkeypatch.setattr(device_choice, name, 0)
    large = run(*words, "-o", tmp_path / "gpu")
    assert large.json["digest"] == small.json["digest"]
    assert large.err.count("measuring: device cuda:0: ") == 1
    assert large.err.count("device cuda:0: ") == 2


def test_several_gpus_are_named_as_a_backend_is(monkeypatch):
    made = Machine({}, count=4)
    made.install(monkeypatch)
    assert open_backend("cuda:1,cuda:3").name == "cuda:1,cuda:3"
    with pytest.raises(DeviceError, match="'cuda:7' is not there"):
        open_backend("cuda:1,cuda:7")
    for word in ("cuda:1,", "cuda:1,cpu", "cuda,cuda:1", "cuda:01"):
        with pytest.raises(InputError, match="is not known"):
            open_backend(word)


def test_only_the_gpu_that_is_asked_for_is_opened(monkeypatch):
    opened = []
    made = Machine({}, count=4)
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), made.count, ""))
    monkeypatch.setattr(self_check, "check", lambda gpu: None)
    before = gpus._gpu
    monkeypatch.setattr(gpus, "_gpu", lambda *one: opened.append(one[1]) or before(*one))
    assert [gpu.number for gpu in gpu_choice.usable_gpus("cuda:2")] == [2]
    assert opened == [2]


class Counted:
    """A backend that does nothing in a known time; it looks at every weight."""

    name = "counted"
    threads = 2

    def __init__(self, weights_per_second: float) -> None:
        self.rate = weights_per_second
        self.asked: list[list[tuple[int, int]]] = []
        self.rules: set[tuple[str, str]] = set()
        self.lock = threading.Lock()

    def quantize_group(self, measured, members, fmt, rule, given=None):
        assert measured == members
        shapes = [weights.shape for weights in members]
        values = np.frombuffer(members[0].rows(0, 1).data, "<u2").astype(np.uint32) << 16
        assert 0 < np.abs(values.view(np.float32)).max() < 1
        with self.lock:
            self.asked.append(shapes)
            self.rules.add((fmt.name, rule))
        time.sleep(sum(map(math.prod, shapes)) / self.rate)
        yield 0, None


class Looked:
    """A clock that notes when the main thread looks at it."""

    def __init__(self, looks: list[float]) -> None:
        self.looks = looks

    def perf_counter(self) -> float:
        now = time.perf_counter()
        if threading.current_thread() is threading.main_thread():
            self.looks.append(now)
        return now


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_rate_is_that_of_all_threads(threads, monkeypatch):
    """Their weights, but to warm up, in the time between the main thread's looks at the clock."""
    backend, looks = Counted(1e9), []
    monkeypatch.setattr(device_choice, "time", Looked(looks))
    rate = weights_per_second(backend, Target("nvfp4"), 4096, threads)
    done = sum(math.prod(shape) for shapes in backend.asked for shape in shapes)
    begun, ended = looks
    assert rate == pytest.approx((done - (threads or 2) * SAMPLE_WEIGHTS) / (ended - begun))
    assert {columns for shapes in backend.asked for _, columns in shapes} == {4096}
    assert backend.rules == {("nvfp4", "mse")}


def test_a_slow_device_does_one_sample_and_a_fast_one_many_in_a_call(monkeypatch):
    slow, fast = Counted(4e7), Counted(1e13)
    weights_per_second(slow, Target("mxfp4", scale_rule="ceil"), 64, 1)
    assert [len(shapes) for shapes in slow.asked] == [1, 1]  # once to warm up
    assert slow.rules == {("mxfp4", "ceil")}
    looks = count()  # a clock that moves on as it is looked at, however busy this machine is
    clock = SimpleNamespace(perf_counter=lambda: next(looks) / 1e3)
    monkeypatch.setattr(device_choice, "time", clock)
    weights_per_second(fast, Target("mxfp4"), 1 << 23, 1)
    assert max(map(len, fast.asked)) == MOST_SAMPLES
    assert {shape for shapes in fast.asked for shape in shapes} == {(1, SAMPLE_WEIGHTS)}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "mxfp8"])
def test_the_processor_here_has_a_rate(format):
    target = Target(format, "compressed-tensors")
    assert weights_per_second(open_backend("cpu"), target, 4096, 0) > 1e6


def test_a_machine_too_busy_to_measure_is_measured_all_the_same(monkeypatch):
    """A process may stand still for longer than a measurement takes."""
    clock = iter(range(0, 10**9, 10))
    busy = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(device_choice, "time", busy)
    assert hashed_bytes_per_second() > 0


@pytest.mark.gpu
def test_a_gpu_has_a_rate_once_it_is_warm():
    from fp4convert.numerics.backends.cuda import Cuda

    found = gpus.survey()
    if not found.gpus:
        pytest.skip(f"no GPU: {found.problem}")
    rates = [weights_per_second(Cuda(found.gpus[:1]), Target("nvfp4"), 4096, 0) for _ in range(3)]
    assert max(rates) < 3 * min(rates)
