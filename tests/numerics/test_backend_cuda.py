"""backends/cuda.py without a GPU: the real kernels and the real pipeline, over streams that put
everything off (simt_gpu.py).

Decides that panels meet the right kernels in the right order, whatever the timing; what kernels
give is decided elsewhere.
A pass here is not a pass on a GPU: those tests are in test_on_gpu.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from adversarial import (
    DTYPES,
    Values,
    assert_same_bytes,
    gaussian,
    generator,
    importance_for,
    matrix,
    random_bits,
    rounded,
)
from checkpoints import LAYER, bf16, llama_shards, run, write_checkpoint, write_llama, write_single
from made_up_inputs import calibrate

from fp4convert.errors import DeviceError, NumericError
from fp4convert.numerics import codec, descent
from fp4convert.numerics.backends import cuda, cuda_kernels, cuda_stream, open_backend
from fp4convert.numerics.backends.base import Given
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import FP4_FORMATS, NVFP4, Format
from fp4convert.numerics.matrices import Matrix, Quantized, RowReader

EVERY_RULE = pytest.mark.parametrize(
    ("fmt", "rule"), [(fmt, rule) for fmt in FP4_FORMATS.values() for rule in fmt.scale_rules]
)


class Recorded(RowReader):
    """Weights in memory that count how often their rows are fetched."""

    def __init__(self, values: Values, dtype: str) -> None:
        self.matrix, self.dtype, self.shape = matrix(values, dtype), dtype, values.shape
        self.fetched: list[tuple[int, int]] = []

    def rows(self, first: int, last: int) -> Matrix:
        raise AssertionError("a GPU asks for copies")

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        row_nbytes = self.matrix.data.nbytes // self.shape[0]
        buffer[:] = self.matrix.data[first * row_nbytes : last * row_nbytes]
        self.fetched.append((first, last))


def gathered(
    panels: Iterator[tuple[int, Quantized]], shapes: Sequence[tuple[int, int]]
) -> list[Quantized]:
    """The panels of each member put together; each is read before the next is asked for."""
    parts: list[list[tuple[bytes, bytes, Quantized]]] = [[] for _ in shapes]
    for number, q in panels:
        parts[number].append((bytes(q.packed), bytes(q.block_scales), q))
    return [
        Quantized(
            own[0][2].format,
            shape,
            memoryview(b"".join(packed for packed, _, _ in own)),
            memoryview(b"".join(scales for _, scales, _ in own)),
            own[0][2].global_scale,
        )
        for own, shape in zip(parts, shapes, strict=True)
    ]


def group_of(dtype: str) -> list[Values]:
    """Three matrices of 9, 1 and 23 panels, and one narrower; none fills its last launch block."""
    return [
        gaussian(dtype, 33, 512),
        random_bits(dtype, 2, 1024),
        gaussian(dtype, 91, 544) * FLOAT_DTYPES[dtype].type(3),
    ]


@pytest.mark.sweep(9)
@EVERY_RULE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room_nbytes", [0, 30_000, 1 << 30])
def test_a_group_is_quantized_under_one_amax_with_any_room(machine, dtype, fmt, rule, room_nbytes):
    machine.free_nbytes = room_nbytes * cuda_stream.LANES * 2
    values = group_of(dtype)
    group_amax = max(float(np.abs(each.astype(np.float32)).max()) for each in values)
    measured = [Recorded(each, dtype) for each in values]
    own = [importance_for(rule, each.shape[1]) for each in values[:2]]  # of another width each
    given = Given(importance=[one for one in own if one is not None])
    found = gathered(
        open_backend("cuda").quantize_group(measured, measured[:2], fmt, rule, given),
        [each.shape for each in values[:2]],
    )
    for q, each, one in zip(found, values[:2], own, strict=True):
        assert_same_bytes(
            q, codec.quantize(each.astype(np.float32), fmt, rule, group_amax, one), each, rule
        )
    panels = [len(set(each.fetched)) for each in measured]
    assert len(measured[2].fetched) == panels[2]  # measured alone: fetched once
    again = sum(len(each.fetched) for each in measured) - sum(panels)
    assert again == {0: panels[0] + panels[1], 1 << 30: 0}.get(room_nbytes, again)
    assert again < panels[0] + panels[1] or not room_nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_amax_takes_the_place_of_the_groups(machine, dtype):
    """2688 makes the global scale 1, whatever the weights are; what lies beyond saturates, and NaN
    is still found.
    """
    values = rounded(generator(7).normal(0, 900, (33, 512)), dtype)
    weights = Recorded(values, dtype)
    (found,) = gathered(
        open_backend("cuda").quantize_group([weights], [weights], NVFP4, "amax", Given(2688.0)),
        [values.shape],
    )
    assert found.global_scale == 1.0
    assert_same_bytes(
        found, codec.quantize(values.astype(np.float32), NVFP4, "amax", 2688.0), values, "amax"
    )
    values[32, 511] = np.nan
    with pytest.raises(NumericError):
        list(
            open_backend("cuda").quantize_group(
                [Recorded(values, dtype)], [Recorded(values, dtype)], NVFP4, "amax", Given(2688.0)
            )
        )


def test_generators_of_two_gpus_do_not_take_turns_in_a_thread(machine):
    """The second leaves its GPU current, on which the first would start its kernels."""
    machine.count = 2
    values = gaussian("BF16", 33, 512)

    def begun(device: str):
        weights = [Recorded(values, "BF16")]
        return open_backend(device).quantize_group(weights, weights, NVFP4, "amax")

    first, second = begun("cuda:0"), begun("cuda:1")
    next(first), next(second)
    with pytest.raises(RuntimeError, match="is for cuda:0; cuda:1 is current"):
        list(first)
    second.close()


def test_under_a_given_amax_nothing_is_measured(machine):
    """Rows are fetched once, what shares the scale elsewhere never; each panel's amax is told."""
    values = gaussian("BF16", 33, 512)
    own, elsewhere = Recorded(values, "BF16"), Recorded(values, "BF16")
    told = []
    given = Given(4.0, note=lambda number, amax: told.append((number, amax)))
    panels = open_backend("cuda").quantize_group([own, elsewhere], [own], NVFP4, "amax", given)
    count = len(list(panels))
    assert (len(own.fetched), elsewhere.fetched) == (count, [])
    assert told == [
        (0, float(np.abs(values[first:last].astype(np.float32)).max()))
        for first, last in own.fetched
    ]


def test_without_device_memory_for_them_panels_are_fetched_twice(machine):
    values = gaussian("BF16", 33, 512)
    weights = Recorded(values, "BF16")
    backend = open_backend("cuda")
    machine.refuse_allocation = lambda number: (
        number > 6 + 1
    )  # amax, scale, arrivals and results, and one panel that stays
    (found,) = gathered(backend.quantize_group([weights], [weights], NVFP4, "amax"), [values.shape])
    assert_same_bytes(
        found, codec.quantize(values.astype(np.float32), NVFP4, "amax"), values, "no room"
    )
    assert len(weights.fetched) > len(set(weights.fetched))


def test_a_gpu_without_memory_for_one_panel_is_refused(machine):
    machine.refuse_allocation = lambda number: number > 3
    weights = Recorded(gaussian("BF16", 33, 512), "BF16")
    backend = open_backend("cuda")
    with pytest.raises(DeviceError, match="bytes of memory left"):
        next(backend.quantize_group([weights], [weights], NVFP4, "amax"))


@pytest.mark.parametrize("shape", [(333, 32), (33, 64), (91, 544), (2, 4096), (1, 8192), (300, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_more_memory_is_pinned_than_the_plan_says(machine, dtype, shape, monkeypatch):
    """CuPy's pool takes powers of two, which the stand-in does not."""
    pinned, pin = [], sys.modules["cupy"].cuda.alloc_pinned_memory
    monkeypatch.setattr(
        sys.modules["cupy"].cuda,
        "alloc_pinned_memory",
        lambda nbytes: pinned.append(1 << (nbytes - 1).bit_length()) or pin(nbytes),
    )
    backend = open_backend("cuda")
    weights = Recorded(gaussian(dtype, *shape), dtype)
    own = importance_for("importance", shape[1])
    list(backend.quantize_group([weights], [weights], NVFP4, "importance", Given(importance=[own])))
    scalars = 2 * cuda_kernels.ALIGNMENT
    assert pinned
    assert sum(pinned) <= backend.held_nbytes(1, shape[1]) + scalars


@pytest.mark.parametrize(
    ("cores", "gpus", "callers"), [(2, 1, 4), (16, 1, 16), (64, 1, 16), (64, 8, 64)]
)
def test_as_many_callers_are_served_as_there_are_cores(machine, cores, gpus, callers, monkeypatch):
    """Each copies what it reads and writes; at least four to a GPU, which wait for a disk."""
    machine.count = gpus
    monkeypatch.setattr(cuda, "processors", lambda: cores)
    backend = open_backend("cuda")
    assert backend.threads == callers == backend._lanes.qsize()
    assert backend.held_nbytes(1000, 512) == callers * backend.held_nbytes(1, 512)


def test_a_refusal_leaves_the_lane_as_it_was(machine, monkeypatch):
    """A lane that could not grow still has the buffers that it had, both sides of them."""
    monkeypatch.setattr("fp4convert.numerics.backends.cuda.LANES", 1)
    backend = open_backend("cuda")
    small, wide = gaussian("BF16", 4, 512), gaussian("F32", 4, 8192)
    expected = codec.quantize(small.astype(np.float32), NVFP4, "amax", 0.25)
    for _ in range(2):  # each of its buffers has been used
        assert_same_bytes(
            backend.quantize(matrix(small, "BF16"), NVFP4, "amax", 0.25), expected, small, "before"
        )
    machine.refuse_allocation = lambda number: True
    with pytest.raises(DeviceError, match="bytes of memory left"):
        backend.quantize(matrix(wide, "F32"), NVFP4, "amax", 0.25)
    machine.refuse_allocation = lambda number: False
    for _ in range(4):
        assert_same_bytes(
            backend.quantize(matrix(small, "BF16"), NVFP4, "amax", 0.25), expected, small, "after"
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 8])
def test_a_gpu_that_is_lost_ends_the_run(machine, tmp_path, workers):
    shard = {
        f"model.layers.{n}.mlp.down_proj.weight": ("BF16", (64, 128), bf16(64, 128, seed=n))
        for n in range(40)
    }
    source = write_single(tmp_path / "source", shard)
    machine.is_lost = True
    outcome = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--device",
        "cuda",
        "--workers",
        workers,
        "-o",
        tmp_path / "o",
        "--json",
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "device-failed")
    assert (
        "cuda:0 (Imaginary GPU) failed: cudaErrorIllegalAddress" in outcome.json["error"]["message"]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 9000, 33 * 512 - 1])
def test_nothing_comes_of_a_group_that_is_not_finite(machine, bad, where):
    values = gaussian("BF16", 33, 512)
    values.reshape(-1)[where] = bad
    group = [Recorded(gaussian("BF16", 4, 512), "BF16"), Recorded(values, "BF16")]
    backend = open_backend("cuda")
    with pytest.raises(NumericError, match="NaN or Inf"):
        next(backend.quantize_group(group, group, NVFP4, "amax"))
    assert backend.amax(matrix(gaussian("BF16", 4, 512), "BF16")) < 1  # the lane is as new


def test_a_caller_that_stops_early_gives_the_lane_back(machine):
    backend = open_backend("cuda")
    values = gaussian("BF16", 33, 512)
    expected = codec.quantize(values.astype(np.float32), NVFP4, "amax")
    for _ in range(2 * cuda_stream.LANES):
        panels = backend.quantize_group(
            [Recorded(values, "BF16")], [Recorded(values, "BF16")], NVFP4, "amax"
        )
        assert bytes(next(panels)[1].packed) == bytes(expected.packed)[: 4 * 256]
        assert machine.unfinished()
        panels.close()
        assert not machine.unfinished()


@pytest.mark.slow
def test_what_stayed_on_the_gpu_is_freed_with_its_group(machine):
    backend = open_backend("cuda")
    held = set()
    for number in range(3 * cuda_stream.LANES):
        weights = Recorded(gaussian("BF16", 33, 512), "BF16")
        assert len(list(backend.quantize_group([weights], [weights], NVFP4, "amax"))) == 9
        gc.collect()
        held.add(
            (number < cuda_stream.LANES) or len(machine.held)
        )  # by then every lane has its buffers
    assert len(held) == 2


def test_what_is_only_measured_takes_no_room(machine):
    machine.free_nbytes = 40_000 * cuda_stream.LANES * 5 // 4
    other, own = (
        Recorded(gaussian("BF16", 33, 512), "BF16") for _ in range(2)
    )  # 33,792 bytes each
    list(open_backend("cuda").quantize_group([other, own], [own], NVFP4, "amax"))
    assert len(own.fetched) == len(other.fetched) == 9


@EVERY_RULE
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_under_a_given_amax_is_never_measured(machine, dtype, fmt, rule):
    values = gaussian(dtype, 33, 512)
    importance = importance_for(rule, 512)
    q = open_backend("cuda:0").quantize(matrix(values, dtype), fmt, rule, 0.25, importance)
    assert_same_bytes(
        q, codec.quantize(values.astype(np.float32), fmt, rule, 0.25, importance), values, "given"
    )
    assert not [name for _, name in machine.launches if name.startswith("amax")]


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(machine, fmt, kind, dtype):
    values = gaussian("BF16", 47, 544).astype(np.float32)
    q = codec.quantize(values, fmt, fmt.default_rule)
    if fmt.has_global_scale:
        q = Quantized(
            fmt,
            q.shape,
            q.packed,
            q.block_scales,
            q.global_scale if kind == "multiplier" else 1234.5,
            kind,
        )
    found = np.frombuffer(open_backend("cuda").dequantize(q, dtype), FLOAT_DTYPES[dtype]).reshape(
        q.shape
    )
    assert found.tobytes() == codec.dequantize(q).astype(FLOAT_DTYPES[dtype]).tobytes()


def test_a_value_beyond_fp16_is_refused(machine):
    q = codec.quantize(np.full((4, 64), 70000.0, np.float32), NVFP4, "amax")
    with pytest.raises(NumericError, match="beyond 65504"):
        open_backend("cuda").dequantize(q, "F16")


# --------------------------------------------------------------------------------------------------
# descents


def to_descend(
    fmt: Format, rows: int, columns: int, width: int
) -> tuple[Values, Quantized, Values]:
    """Weights, their codes, and blocks of H."""
    x = generator(90, rows).standard_normal((rows, columns), np.float32)
    inputs = generator(91, width).standard_normal((columns // width, width, 2 * width), np.float32)
    h = inputs @ inputs.swapaxes(1, 2)
    return x, codec.quantize(x, fmt, "mse"), (h + h.swapaxes(1, 2)) / np.float32(2)


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@pytest.mark.parametrize("width", [32, 96])
def test_a_descent_goes_by_panels_under_an_h_that_is_uploaded_once(machine, fmt, width):
    x, q, h = to_descend(fmt, 37, 96, width)
    expected = descent.descend(x, q, h, 2)
    for room_nbytes, panels in ((1 << 20, 1), (0, 3)):
        machine.free_nbytes = room_nbytes * cuda_stream.LANES * 2
        machine.launches.clear(), machine.copied.clear()
        found = open_backend("cuda").descend(x, q, h, 2)
        assert_same_bytes(found, expected, x, f"{panels} panels")
        assert (found.shape, found.global_scale) == (q.shape, q.global_scale)
        assert machine.launches == [(0, f"descend_{fmt.name}")] * panels
        assert machine.copied.count(("up", h.nbytes)) == 1
        assert not machine.unfinished()


def test_a_descent_without_device_memory_is_refused(machine):
    x, q, h = to_descend(NVFP4, 5, 64, 64)
    backend = open_backend("cuda")
    machine.refuse_allocation = lambda number: True
    for _ in range(2):  # the GPU is free again
        with pytest.raises(DeviceError, match="bytes of memory left") as caught:
            backend.descend(x, q, h, 1)
    assert caught.value.code == "device-memory"
    machine.refuse_allocation = lambda number: False
    assert_same_bytes(backend.descend(x, q, h, 1), descent.descend(x, q, h, 1), x, "after")
    with pytest.raises(ValueError, match="expected blocks of n columns that cover 64"):
        backend.descend(x, q, h[:, :32], 1)


# --------------------------------------------------------------------------------------------------
# whole commands


@pytest.mark.timeout(240)
def test_gptq_goes_over_its_codes_on_the_gpu(machine, tmp_path, monkeypatch):
    """Where the one lane is held by the caller that waits for a descent; torch stays on the CPU
    here, so that the bytes are the CPU's.
    """
    monkeypatch.setattr("fp4convert.makers.methods.gptq.torch_device", lambda name: "cpu")
    monkeypatch.setattr(cuda, "LEAST_LANES", 1)
    monkeypatch.setattr(cuda, "processors", lambda: 1)
    source = write_llama(tmp_path / "source")
    file = calibrate(tmp_path / "full.safetensors", source, "full")
    options = ("--calibration", file, "--method", "gptq", "--json")
    made = {
        device: run(
            *("quantize", source, "--format", "nvfp4", "--device", device),
            *(*options, "-o", tmp_path / device),
        ).json
        for device in ("cpu", "cuda")
    }
    assert made["cuda"]["digest"] == made["cpu"]["digest"]
    descents = [number for number, name in machine.launches if name == "descend_nvfp4"]
    assert len(descents) >= 7


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("fmt", "dialect"),
    [
        ("nvfp4", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
        ("nvfp4", "modelopt"),
        ("nvfp4", "mlx"),
        ("nvfp4", "comfy"),
    ],
)
def test_the_same_artifact_as_on_the_cpu(machine, fmt, dialect, count, tmp_path):
    machine.count = count
    source = write_llama(tmp_path / "source")
    options = ("--format", fmt, "--dialect", dialect, "--json")
    expected = run("quantize", source, *options, "--device", "cpu", "-o", tmp_path / "cpu").json
    found = run("quantize", source, *options, "--device", "cuda", "-o", tmp_path / "cuda").json
    assert found["digest"] == expected["digest"]
    assert found["device"] == ",".join(f"cuda:{number}" for number in range(count))
    assert {number for number, _ in machine.launches} == set(range(count))
    back = [
        run(
            "dequantize", tmp_path / "cuda", "--device", d, "-o", tmp_path / f"back-{d}", "--json"
        ).json
        for d in ("cpu", "cuda")
    ]
    assert back[0]["digest"] == back[1]["digest"]
    assert any(name.startswith("dequantize") for _, name in machine.launches)


def test_weights_that_are_not_finite_are_named_as_on_the_cpu(machine, tmp_path):
    name = f"{LAYER}.mlp.down_proj.weight"
    data = bytearray(bf16(64, 128))
    data[300:302] = b"\xc0\x7f"
    source = write_single(tmp_path / "source", {name: ("BF16", (64, 128), bytes(data))})
    outcomes = [
        run("quantize", source, "--format", "nvfp4", "-o", tmp_path / d, "--device", d, "--json")
        for d in ("cpu", "cuda")
    ]
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert outcomes[0].json["error"]["message"] == outcomes[1].json["error"]["message"]
    assert "[1, 22]" in outcomes[1].json["error"]["message"]


def test_a_shard_that_is_cut_off_meanwhile_ends_the_run(machine, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", llama_shards())
    shard = source / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    before = cuda.Cuda.quantize_group

    def cut(*arguments):
        shard.write_bytes(whole[: len(whole) // 2])
        return before(*arguments)

    monkeypatch.setattr(cuda.Cuda, "quantize_group", cut)
    outcome = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--device",
        "cuda",
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-changed")


# --------------------------------------------------------------------------------------------------
# kernels that do not load


def test_a_cubin_that_the_driver_refuses_is_made_again(machine, cache):
    """As long as its tables say, but damaged inside: only the driver sees that."""
    values = gaussian("BF16", 33, 512)
    expected = codec.quantize(values.astype(np.float32), NVFP4, "amax", 0.25)
    open_backend("cuda").quantize(matrix(values, "BF16"), NVFP4, "amax", 0.25)
    (path,) = (cache / "fp4convert").glob("quantize-*.cubin")
    whole = path.read_bytes()
    path.write_bytes(whole[:900] + b"damage" + whole[906:])
    machine.refuse_module = lambda cubin: b"damage" in cubin
    found = open_backend("cuda").quantize(matrix(values, "BF16"), NVFP4, "amax", 0.25)
    assert_same_bytes(found, expected, values, "made again")
    assert path.read_bytes() == whole


def test_a_driver_that_refuses_every_cubin_is_told(machine):
    machine.refuse_module = lambda cubin: True
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_IMAGE"):
        open_backend("cuda").amax(matrix(gaussian("BF16", 4, 512), "BF16"))
