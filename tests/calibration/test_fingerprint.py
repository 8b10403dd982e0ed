"""Which checkpoint it is: what differs in one small tensor is another; little is read to tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from checkpoints import LLAMA, bf16, write_checkpoint
from true_shapes import LLAMA_70B, QWEN3_CODER_480B, Decoder

from fp4convert.calibration.fingerprint import telling_ranges, weights_of
from fp4convert.storage.open import open_source
from fp4convert.storage.safetensors import Header, SafetensorsFrame, TensorRef
from fp4convert.storage.source import Checkpoint

NORM, BIG = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"


def write_model(folder: Path) -> Path:
    """A shard of 6 MB, 8 kB of which are norms."""
    tensors = {BIG: ("BF16", (1024, 2048), bf16(1024, 2048))}
    tensors |= {
        f"model.layers.{n}.input_layernorm.weight": ("BF16", (2048,), bf16(2048, seed=n))
        for n in range(2)
    }
    tensors |= {
        "model.layers.1.mlp.down_proj.weight": ("BF16", (512, 2048), bf16(512, 2048, seed=9))
    }
    return write_checkpoint(folder, {"model.safetensors": tensors}, LLAMA)


def place_of(folder: Path, name: str) -> TensorRef:
    return next(ref for ref in open_source(str(folder)).checkpoint.tensors if ref.name == name)


def flip(folder: Path, place: int) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 1000, 4095])
def test_one_bit_of_a_norm_makes_other_weights(tmp_path, at):
    folder = write_model(tmp_path / "m")
    before = weights_of(open_source(str(folder)))
    assert weights_of(open_source(str(write_model(tmp_path / "copy")))) == before
    flip(folder, place_of(folder, NORM).start + at)
    assert weights_of(open_source(str(folder))) != before


def test_every_large_tensor_is_sampled(tmp_path):
    folder = write_model(tmp_path / "m")
    before = weights_of(open_source(str(folder)))
    for name in (BIG, "model.layers.1.mlp.down_proj.weight"):
        ref = place_of(folder, name)
        read = [
            piece
            for piece in telling_ranges(open_source(str(folder)).checkpoint)
            if piece.name == name
        ]
        assert len(read) == 16
        assert all(
            ref.start <= piece.start and piece.start + piece.nbytes <= ref.start + ref.nbytes
            for piece in read
        )
        for place in (read[0].start, read[-1].start + 4095):
            flip(folder, place)
            assert weights_of(open_source(str(folder))) != before
            flip(folder, place)
    assert weights_of(open_source(str(folder))) == before


def test_a_hub_says_what_a_folder_says(tmp_path, hub):
    folder = write_model(tmp_path / "m")
    hub.add("someone/model", folder)
    assert weights_of(open_source("someone/model")) == weights_of(open_source(str(folder)))


def true_checkpoint(
    decoder: Decoder, more: Iterable[tuple[str, str, tuple[int, ...]]] = ()
) -> Checkpoint:
    """Its headers, all in one shard, without anything behind them."""
    refs, at = [], 0
    for name, dtype, shape in (
        *((name, "BF16", shape) for name, shape in decoder.tensors()),
        *more,
    ):
        refs.append(TensorRef(name, dtype, shape, "model.safetensors", at))
        at += refs[-1].nbytes
    return Checkpoint(
        None,
        None,
        {},
        (Header("model.safetensors", at, tuple(refs), SafetensorsFrame({})),),
        (),
        (),
        (),
        {},
    )


def scales_of_experts(decoder: Decoder) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, shape in decoder.tensors():
        if "_proj" in name:
            yield f"{name}_scale_inv", "F32", tuple(math.ceil(count / 128) for count in shape)


@pytest.mark.parametrize(
    ("checkpoint", "requests", "nbytes"),
    [
        # 161 norms of 16 kB, 562 matrices with a sample each
        (true_checkpoint(LLAMA_70B), 161 + 562, 161 * 16384 + 562 * 4096),
        # all 249 norms, 310 scales of attention and 1489 of 29,760 of experts; 1024 of 30,198
        # matrices
        (
            true_checkpoint(QWEN3_CODER_480B, scales_of_experts(QWEN3_CODER_480B)),
            2048 + 1024,
            15 * 10**6,
        ),
    ],
    ids=["Llama-70B", "Qwen3-Coder-480B-FP8"],
)
def test_little_is_read_of_a_large_model(checkpoint, requests, nbytes):
    read = telling_ranges(checkpoint)
    assert len(read) == requests
    assert sum(piece.nbytes for piece in read) <= nbytes
    assert [piece.start for piece in read] == sorted(piece.start for piece in read)
    few = {ref.name for ref in checkpoint.tensors if "norm" in ref.name or "self_attn" in ref.name}
    assert few <= {piece.name for piece in read}


def test_what_is_read_is_all_that_is_asked_for(tmp_path, monkeypatch):
    source = open_source(str(write_model(tmp_path / "m")))
    asked: list[int] = []
    read_into = type(source).read_into

    def counted(self, ref, start, buffer):
        asked.append(buffer.nbytes)
        read_into(self, ref, start, buffer)

    monkeypatch.setattr(type(source), "read_into", counted)
    weights_of(source)
    assert asked == [4096] * (2 + 2 * 16)  # of 6 MB
