"""Dialect nunchaku: the order of every byte is that of the packer that Diffusers' kernels read."""

import json

import numpy as np
import pytest
from paths import ROOT

from fp4convert.checkpoint.dialects import nunchaku
from fp4convert.checkpoint.dialects.base import Clues, Ignored, MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.low_rank import Correction
from fp4convert.numerics.matrices import Quantized

torch = pytest.importorskip("torch")
M = "transformer_blocks.0.attn.to_q"
FORM = Form(NVFP4, 4, "nunchaku", rank=32)
SHAPE = (256, 128)


@pytest.fixture(scope="module")
def packed():
    """What cache-dit 1.5.3 makes of random codes, scales, vectors and factors."""
    from safetensors.torch import load_file

    return load_file(ROOT / "tests" / "golden" / "svdq_nvfp4.safetensors")


def bytes_of(tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def quantized(packed) -> Quantized:
    codes = packed["given/codes"].numpy()
    low_first = (codes[:, ::2] | codes[:, 1::2] << 4).tobytes()
    scales = bytes_of(packed["given/scales"])
    return Quantized(NVFP4, SHAPE, memoryview(low_first), memoryview(scales), 2.0**-9)


def correction(packed) -> Correction:
    smooth, down, up = (
        packed[f"given/{name}"].float().numpy() for name in ("smooth", "down", "up")
    )
    return Correction(smooth, down, up)


def joined(parts) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, data in parts:
        found[name] = found.get(name, b"") + bytes(data)
    return found


@pytest.mark.parametrize("height", [1, 100, 128, 200, 256])
def test_codes_and_scales_lie_as_the_packer_lays_them(height, packed):
    q = quantized(packed)
    panels = (q.rows(first, min(first + height, 256)) for first in range(0, 256, height))
    made = joined(MatrixEncoder(nunchaku, FORM, None).encode(M, SHAPE, panels))
    assert made == {
        f"{M}.qweight": bytes_of(packed["qweight"]),
        f"{M}.wscales": bytes_of(packed["wscales"]),
        f"{M}.wtscale": b"\x00\x3b",  # 2^-9 as bf16
    }


def test_vectors_and_factors_lie_as_the_packer_lays_them(packed):
    made = joined(nunchaku.encode_correction(M, correction(packed)))
    assert made == {
        f"{M}.wcscales": b"\x80\x3f" * 256,  # ones
        **{
            f"{M}.{name}": bytes_of(packed[name])
            for name in ("smooth_factor", "proj_down", "proj_up")
        },
    }
    bias = packed["given/bias"]
    assert torch.equal(bias[torch.from_numpy(nunchaku.order_of(256))], packed["bias"])


@pytest.mark.parametrize("rows", [(0, 256), (0, 1), (127, 129), (130, 140), (255, 256)])
def test_what_the_packer_made_is_read(rows, packed):
    stored = {f"{M}.{name}": memoryview(bytes_of(value)) for name, value in packed.items()}
    stored[f"{M}.wtscale"] = memoryview(b"\x00\x3b")
    stored[f"{M}.wcscales"] = memoryview(bytes_of(packed["bias"]))  # as if they were no ones
    q = nunchaku.decode(M, SHAPE, FORM, stored.__getitem__)
    own, expected = q.rows(*rows), quantized(packed).rows(*rows)
    assert (bytes(own.packed), bytes(own.block_scales)) == (
        bytes(expected.packed),
        bytes(expected.block_scales),
    )
    assert bytes(q.scales(*rows)) == bytes(expected.block_scales)
    assert (q.global_scale, q.kind) == (2.0**-9, "multiplier")
    found = nunchaku.decode_correction(M, SHAPE, stored.__getitem__)
    for own, wanted in zip(found, correction(packed)[:3], strict=False):
        assert np.array_equal(own, wanted)
    assert np.array_equal(found.channels, packed["given/bias"].float().numpy())


def test_names_dtypes_and_shapes_are_those_of_diffusers_class():
    specs = nunchaku.outputs(M, (384, 256), FORM)
    assert {spec.name.removeprefix(f"{M}."): (spec.dtype, spec.shape) for spec in specs} == {
        "qweight": ("I8", (384, 128)),
        "wscales": ("F8_E4M3", (16, 384)),
        "wtscale": ("BF16", (1,)),
        "wcscales": ("BF16", (384,)),
        "smooth_factor": ("BF16", (256,)),
        "proj_down": ("BF16", (256, 32)),
        "proj_up": ("BF16", (384, 32)),
    }


def test_a_global_scale_that_is_no_bf16_is_never_cut(packed):
    q = quantized(packed)
    odd = Quantized(NVFP4, SHAPE, q.packed, q.block_scales, float(np.float32(0.0123)))
    with pytest.raises(RuntimeError, match="no bf16"):
        joined(MatrixEncoder(nunchaku, FORM, None).encode(M, SHAPE, iter([odd])))


@pytest.mark.parametrize("shape", [(128, 64), (100, 128), (192, 192)])
def test_tiles_that_are_not_whole_have_no_place(shape):
    reason = f"{shape[0]} x {shape[1]}, and Nunchaku's tiles need multiples of 128"
    assert nunchaku.unfit(M, shape, FORM) == reason
    assert nunchaku.unfit(M, (128, 384), FORM) is None


RECORD = {
    "quant_method": "nunchaku_lite",
    "compute_dtype": "bfloat16",
    "svdq_w4a4": {"precision": "nvfp4", "group_size": 16, "rank": 32, "targets": [M, "proj"]},
}


def test_the_record_is_what_diffusers_documents():
    made = nunchaku.records([Group(FORM, ("proj", M))], Ignored((), ()))
    section = {**RECORD["svdq_w4a4"], "targets": sorted([M, "proj"])}
    expected = {"config.json": {"quantization_config": {**RECORD, "svdq_w4a4": section}}}
    assert made == expected


def clues(**section: object) -> Clues:
    record = json.loads(json.dumps(RECORD))
    record["svdq_w4a4"].update(section)
    return Clues({"quantization_config": record}, {}, {})


def test_the_record_is_read():
    assert nunchaku.recognise(clues()) == (Group(FORM, (M, "proj")),)
    (other,) = nunchaku.recognise(clues(rank=128))
    assert other.form.rank == 128
    is_ignored = dialect_named("nunchaku").ignores(clues())
    assert [is_ignored(name) for name in (M, "proj", "proj_out")] == [False, False, True]


@pytest.mark.parametrize(
    "section",
    [{"precision": "int4", "group_size": 64}, {"group_size": 32}, {"rank": 0}, {"targets": []}],
)
def test_other_sections_are_no_nvfp4(section):
    assert nunchaku.recognise(clues(**section)) == ()


def test_a_target_without_tensors_is_found():
    found = list(nunchaku.judge(clues()))
    assert [(one.level, one.code, one.tensor) for one in found] == [
        ("error", "packed-missing", M),
        ("error", "packed-missing", "proj"),
    ]
