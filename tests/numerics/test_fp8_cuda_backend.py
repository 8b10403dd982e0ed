"""FP8 and MXFP8 on an imaginary GPU: the artifacts of the CPU.

simt_gpu.py stands in for CuPy, and kernels run on the host.
"""

from __future__ import annotations

import numpy as np
import pytest
from adversarial import DTYPES, gaussian, generator, matrix
from checkpoints import LAYER, LLAMA, Tensor, bf16, run, write_single

from fp4convert.errors import NumericError
from fp4convert.numerics.backends import cuda_stream, open_backend
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import FP8, MXFP8, Format
from fp4convert.numerics.fp8_rounding import find_scales
from fp4convert.numerics.matrices import InMemory

SHAPES = {
    f"{LAYER}.self_attn.q_proj": (160, 96),
    f"{LAYER}.self_attn.k_proj": (37, 96),
    f"{LAYER}.mlp.gate_proj": (200, 96),
    f"{LAYER}.mlp.down_proj": (96, 224),
}
TARGETS = [  # by rows, the whole, blocks of 128x128, 32 of a row
    ("fp8", "compressed-tensors"),
    ("fp8", "modelopt"),
    ("fp8", "deepseek"),
    ("mxfp8", "compressed-tensors"),
]
BLOCKS = [(FP8, (70, 300)), (FP8, (1, 300)), (FP8, (64, 128)), (FP8, (48, 77)), (MXFP8, (1, 32))]


@pytest.mark.parametrize("free_nbytes", [0, 1 << 40])
@pytest.mark.parametrize(("fmt", "dialect"), TARGETS)
@pytest.mark.sweep(3)
def test_the_same_artifact_as_on_the_cpu(machine, fmt, dialect, free_nbytes, tmp_path):
    machine.free_nbytes = free_nbytes  # for panels that stay between the passes
    tensors: dict[str, Tensor] = {
        f"{module}.weight": ("BF16", shape, bf16(*shape, seed=len(module)))
        for module, shape in SHAPES.items()
    }
    source = write_single(tmp_path / "source", tensors, {**LLAMA, "hidden_size": 96})
    for rule in {"fp8": ("amax", "mse"), "mxfp8": ("even", "mse")}[fmt]:
        words = ("quantize", source, "--format", fmt, "--dialect", dialect, "--scale-rule", rule)
        outcomes = [
            run(*words, "--json", "--device", device, "-o", tmp_path / f"{rule}-{device}")
            for device in ("cpu", "cuda")
        ]
        expected, found = (outcome.json for outcome in outcomes)
        assert found["digest"] == expected["digest"]
        assert found["tensors"] == expected["tensors"]
        assert found["tensors"]["quantized"] == len(SHAPES)
        assert found["device"] == "cuda:0"
        reports = [tmp_path / f"{rule}-{d}" / "quantization_report.json" for d in ("cpu", "cuda")]
        assert reports[0].read_text() == reports[1].read_text()
    names = {name for _, name in machine.launches}
    assert {"grid_amax_bf16", "quantize_fp8_bf16", "compare_values_bf16", "add_costs"} <= names
    assert "amax_bf16" not in names


@pytest.mark.parametrize("panel_elements", [2048, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fmt", "block"), BLOCKS)
def test_scales_and_panels(
    machine, fmt: Format, block: tuple[int, int], dtype: str, panel_elements: int, monkeypatch
):
    """Blocks that go on in the next panel; tables of many pieces."""
    monkeypatch.setattr(cuda_stream, "GPU_PANEL_ELEMENTS", panel_elements)
    values = gaussian(dtype, 70, 320)[:, :300]
    values[3], values[40:] = 0, values[40:] * values.dtype.type(2.0**-9)
    weights, gpu = InMemory(matrix(values, dtype)), open_backend("cuda")
    for rule in fmt.scale_rules:
        expected = find_scales(weights, block, fmt, rule)
        with gpu.fp8_passes(weights) as passes:
            scales = find_scales(weights, block, fmt, rule, passes)
            panels = [
                (panel.first, bytes(panel.codes), bytes(panel.compared.rows))
                for panel in passes.fp8_panels(weights, block, scales)
            ]
        assert scales.tobytes() == expected.tobytes()
        own = list(Cpu().fp8_panels(weights, block, expected))
        assert b"".join(codes for _, codes, _ in panels) == b"".join(p.codes for p in own)
        assert b"".join(rows for *_, rows in panels) == b"".join(p.compared.rows for p in own)
        assert len(panels) == (1 if panel_elements > 2048 else -(-70 // 5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(machine, bad):
    values = generator(1).standard_normal((70, 96)).astype(np.float32)
    values[69, 95] = bad
    weights = InMemory(matrix(values, "F32"))
    with open_backend("cuda").fp8_passes(weights) as passes, pytest.raises(NumericError):
        find_scales(weights, (64, 64), FP8, "amax", passes)
