"""Scales that stand once per module: which bytes are read for them, and what they mean."""

import math
import struct
from types import SimpleNamespace

import pytest

from fp4convert.checkpoint.dialects.base import Packed
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.quality.scale_checks import read_global_scales, read_input_scales
from fp4convert.storage.safetensors import TensorRef

FILES = {"a": struct.pack("<4f", 9, 2, 4, 8), "b": struct.pack("<2f", 16, 0)}


class Source:
    """Two files of float32."""

    def __init__(self, is_streamed: bool) -> None:
        self.is_streamed = is_streamed
        self.asked: list[tuple[str, int, int]] = []

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        self.asked.append((ref.file, ref.start + start, buffer.nbytes))
        buffer[:] = FILES[ref.file][ref.start + start :][: buffer.nbytes]

    def stop(self) -> None:
        raise AssertionError


def artifact_of(
    dialect: str, form: Form, places: dict[str, tuple[str, int]], is_streamed: bool = False
) -> SimpleNamespace:
    """Modules m, n, o and p, and scales at those places, in the order of the files."""
    tensors = {name: TensorRef(name, "F32", (1,), *place) for name, place in places.items()}
    modules = {name: Packed((), (1, 16), (), name, (1, 16), (), form) for name in "pmno"}
    return SimpleNamespace(
        source=Source(is_streamed),
        tensors=tensors,
        modules=modules,
        spelling=dialect_named(dialect),
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_neighbours_are_read_together_and_nothing_between_them(is_streamed):
    ending = ".weight_global_scale"
    places = {
        f"m{ending}": ("a", 4),
        f"n{ending}": ("a", 8),
        "other": ("a", 12),
        f"o{ending}": ("b", 0),
        f"p{ending}": ("b", 4),
    }
    artifact = artifact_of("compressed-tensors", Form(NVFP4), places, is_streamed)
    assert read_global_scales(artifact, ["p", "m", "n", "o"]) == {
        "p": 0.0,
        "m": 2.0,
        "n": 4.0,
        "o": 16.0,
    }
    assert sorted(artifact.source.asked) == [("a", 4, 8), ("b", 0, 8)]


def test_tensors_at_the_same_place_of_two_files_are_no_neighbours():
    places = {
        "m.weight_scale_2": ("a", 0),
        "n.weight_scale_2": ("b", 4),
        "o.weight_scale_2": ("a", 8),
    }
    artifact = artifact_of("modelopt", Form(NVFP4), places)
    assert read_global_scales(artifact, ["m", "n", "o"]) == {"m": 9.0, "n": 0.0, "o": 4.0}
    assert len(artifact.source.asked) == 3


def test_input_scales_are_multipliers_of_forms_that_have_them():
    places = {"m.input_global_scale": ("a", 8), "n.input_global_scale": ("b", 4)}
    artifact = artifact_of("compressed-tensors", Form(NVFP4, 4), places)
    assert read_input_scales(artifact, ["m", "n"]) == {"m": 0.25, "n": math.inf}
    assert read_input_scales(artifact_of("compressed-tensors", Form(NVFP4), places), ["m"]) == {}
    assert read_input_scales(
        artifact_of("modelopt", Form(NVFP4, 4), {"m.input_scale": ("a", 8)}), ["m"]
    ) == {"m": 4.0}


def test_scales_that_are_not_there_are_one_where_the_format_has_them():
    assert read_global_scales(artifact_of("gguf", Form(NVFP4), {}), ["m"]) == {"m": 1.0}
    assert read_global_scales(artifact_of("mlx", Form(NVFP4), {}), ["m"]) == {"m": 1.0}
    assert read_global_scales(artifact_of("compressed-tensors", Form(MXFP4), {}), ["m"]) == {}
