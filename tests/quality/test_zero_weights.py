"""Matrices and norms of zeros alone, which nothing passes: told by quantize, inspect and verify."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import LLAMA, Tensor, run, weight, write_single

OUT, DOWN = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM, NEXT = "model.norm.weight", "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"
ONES = b"\x80\x3f"  # of bf16


def write(folder: Path, *zeros: str) -> Path:
    """A checkpoint whose tensors of these names are zero."""
    tensors: dict[str, Tensor] = {
        **{name: weight(n, 64, 128) for n, name in enumerate((OUT, DOWN, HEAD))},
        **dict.fromkeys((NORM, NEXT), ("BF16", (64,), ONES * 64)),
    }
    for name in zeros:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes(len(data)))
    return write_single(folder, tensors, LLAMA)


def told(command: str, folder: Path) -> list[tuple[str, str, str]]:
    findings = run(command, folder, "--json").json["findings"]
    return [
        (one["level"], one["tensor"].removesuffix(".weight"), one["detail"].split()[3])
        for one in findings
        if one["code"] == "zero-weights"
    ]


@pytest.mark.parametrize(
    "options",
    [
        ("--dialect", "compressed-tensors"),
        ("--dialect", "modelopt"),
        ("--dialect", "comfy"),
        ("--format", "mxfp4", "--dialect", "quark"),
        ("--format", "mxfp4", "--dialect", "mlx"),
        ("--format", "fp8"),
        ("--format", "fp8", "--dialect", "modelopt"),
        ("--format", "mxfp8"),
    ],
    ids=" ".join,
)
def test_a_matrix_of_zeros_is_named(options, tmp_path):
    source, out = write(tmp_path / "m", OUT, HEAD), tmp_path / "q"
    (line,) = [line for line in quantize(source, out, *options)["warnings"] if "zeros" in line]
    assert line == f"weights of zeros alone: 1, the first {OUT}; is the source whole?"
    matrix = ("warning", OUT.removesuffix(".weight"), "1")
    assert told("inspect", out) == [matrix]
    # Matrices that stay are read by verify alone.
    assert told("verify", out) == [matrix, ("warning", "lm_head", "1")]
    assert run("inspect", out).code == 0


def test_a_matrix_that_is_not_zero_is_not_named(tmp_path):
    out = tmp_path / "q"
    assert "zeros" not in str(quantize(write(tmp_path / "m"), out)["warnings"])
    assert told("inspect", out) == told("verify", out) == []


@pytest.mark.parametrize("zeros", [(NORM,), (NEXT,)])
def test_a_norm_of_zeros_is_named(zeros, tmp_path):
    out = tmp_path / "q"
    made = quantize(write(tmp_path / "m", *zeros), out)
    assert (
        f"weights of zeros alone: 1, the first {zeros[0]}; is the source whole?" in made["warnings"]
    )
    assert made["fidelity"]["zeros"] == {"tensors": 1, "first": zeros[0]}
    for command in ("inspect", "verify"):
        assert told(command, out) == [("warning", zeros[0].removesuffix(".weight"), "1")]


def test_a_negative_zero_is_a_zero(tmp_path):
    source, out = write(tmp_path / "m"), tmp_path / "q"
    norm: Tensor = ("BF16", (64,), b"\0\x80" * 64)
    head: Tensor = ("BF16", (64, 128), b"\0\x80" * 64 * 128)
    out_proj = dict.fromkeys((OUT, HEAD), head)
    ones = {NEXT: ("BF16", (64,), ONES * 64), DOWN: weight(1, 64, 128)}
    write_single(source, {**out_proj, **ones, NORM: norm}, LLAMA)
    assert quantize(source, out)["fidelity"]["zeros"] == {"tensors": 2, "first": OUT}
    assert told("inspect", out) == [
        ("warning", OUT.removesuffix(".weight"), "1"),
        ("warning", "model.norm", "1"),
    ]


def test_norms_that_are_added_to_one_start_from_zeros(tmp_path):
    """As in fresh models of Gemma."""
    out = tmp_path / "q"
    assert "zeros" not in str(quantize(write(tmp_path / "m", NORM, NEXT), out))
    assert told("inspect", out) == told("verify", out) == []
