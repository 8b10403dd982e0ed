"""Which GPUs can be used, and what is said where one cannot: by the survey, by --device, by exit
codes.
"""

from __future__ import annotations

import ctypes
import sys

import pytest
from checkpoints import run, write_llama
from simt_gpu import CUDARuntimeError, Machine

from fp4convert.errors import DeviceError
from fp4convert.numerics.backends import gpu_choice, gpus, open_backend

DRIVER = ((13, 0), 1, "")


@pytest.fixture
def machine(monkeypatch):
    made = Machine({})
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1", "cuda:0:1", "cpu:0", "", "CUDA"]
)
def test_a_device_that_is_not_there_is_refused(machine, device, tmp_path):
    outcome = run(
        "quantize",
        write_llama(tmp_path / "s"),
        "--format",
        "nvfp4",
        "--device",
        device,
        "-o",
        tmp_path / "o",
        "--json",
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-device")
    assert "expected" in outcome.json["error"]["message"]
    assert "fp4convert doctor" in outcome.json["error"]["next"]
    assert not (tmp_path / "o").exists()


PROBLEMS = {
    "no driver": ((None, 0, "there is no NVIDIA driver"), {}, "no NVIDIA driver"),
    "no GPU": (((12, 9), 0, "the NVIDIA driver shows no GPU"), {}, "shows no GPU"),
    "no CuPy": (DRIVER, {"find_spec": lambda name: None}, "CuPy is not installed"),
    "NVRTC too new": (((11, 8), 1, ""), {}, "newer than the driver"),
    "GPU too old": (DRIVER, {"capability": (7, 5)}, "capability 7.5 is too old"),
}


@pytest.mark.parametrize(("driver", "changes", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_why_there_is_no_gpu_is_told(machine, monkeypatch, driver, changes, expected):
    machine.capability = changes.get("capability", machine.capability)
    monkeypatch.setattr(gpus, "ask_driver", lambda: driver)
    if "find_spec" in changes:
        monkeypatch.setattr(gpus.importlib.util, "find_spec", changes["find_spec"])
    with pytest.raises(DeviceError, match=expected) as caught:
        open_backend("cuda")
    assert "doctor" in caught.value.next_step
    assert open_backend("auto").name == "cpu"


def test_cupy_that_does_not_load_is_told(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(DeviceError, match="does not load"):
        open_backend("cuda")


def test_one_gpu_too_old_does_not_hide_the_others(machine):
    machine.count, machine.capabilities = 3, {0: (7, 5)}
    assert open_backend("cuda").name == open_backend("auto").name == "cuda:1,cuda:2"
    assert open_backend("cuda:2").name == "cuda:2"
    with pytest.raises(DeviceError, match=r"cuda:0.*capability 7\.5 is too old"):
        open_backend("cuda:0")
    (warning,) = gpu_choice.unused("auto")
    assert "cuda:0 is not used: compute capability 7.5" in warning


def test_a_gpu_that_takes_no_context_is_told(machine, monkeypatch):
    def refuse(number):
        raise CUDARuntimeError("cudaErrorDevicesUnavailable: exclusive use\nmore")

    monkeypatch.setattr(sys.modules["cupy"].cuda, "Device", refuse)
    with pytest.raises(DeviceError, match="cudaErrorDevicesUnavailable: exclusive use"):
        open_backend("cuda")
    assert open_backend("auto").name == "cpu"
    assert "exclusive use" in gpu_choice.unused("auto")[0]
    assert run("doctor", "--json").json["gpus_refused"] == [
        {"device": "cuda:0", "reason": "cudaErrorDevicesUnavailable: exclusive use"}
    ]


class Driver:
    """libcuda.so.1 with these answers."""

    def __init__(self, init: int, count: int) -> None:
        self.init, self.count = init, count

    def cuDriverGetVersion(self, number):  # noqa: N802
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = 12090
        return 0

    def cuInit(self, flags):  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self.count
        return 0


@pytest.mark.parametrize(
    ("init", "count", "expected"),
    [
        (0, 2, ((12, 9), 2, "")),
        (0, 0, ((12, 9), 0, "the NVIDIA driver shows no GPU")),
        (100, 0, ((12, 9), 0, "the NVIDIA driver shows no GPU")),
        (803, 0, ((12, 9), 0, "the NVIDIA driver refuses to start (CUDA error 803)")),
    ],
)
def test_the_driver_is_understood(monkeypatch, init, count, expected):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(init, count))
    assert gpus.ask_driver() == expected
    if not count:  # with a GPU, CuPy decides
        assert bool(gpu_choice.unused("auto")) == (init == 803)


def test_a_library_that_is_no_driver_is_told(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert "is not an NVIDIA driver" in gpus.ask_driver()[2]
    assert run("doctor", "--json").json["device"] == "cpu"
