"""Low-rank corrections: close to the best of their rank, the same everywhere, and no worse than
what Diffusers' pull request 14608 computes.
"""

import numpy as np
import pytest
from cpu_levels import every_level

from fp4convert.checkpoint.encodings import corrected
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import FLOATS
from fp4convert.errors import NumericError
from fp4convert.makers import corrected as rounding
from fp4convert.makers.corrected import Corrected, find_correction
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_matrix, decode_e2m1, unpack
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.matrices import InMemory
from fp4convert.recipes.recipe import Target

torch = pytest.importorskip("torch")
RANK = 32
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TARGET = Target("nvfp4", "nunchaku", "mse", activations=4, method="rtn")


def in_memory(w: np.ndarray) -> InMemory:
    return InMemory(as_matrix(np.ascontiguousarray(w, np.float32)))


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def decaying(rows: int, columns: int, power: float) -> np.ndarray:
    """Singular values k^-power, and columns of very different sizes, as in diffusion models."""
    left, right = (
        np.linalg.qr(gaussian(rows, columns, 1))[0],
        np.linalg.qr(gaussian(columns, columns, 2))[0],
    )
    w = left * np.arange(1, columns + 1) ** -power @ right.T
    return w * np.exp(np.random.default_rng(3).standard_normal(columns))


MATRICES = {
    "gaussian": gaussian(384, 256),
    "flat": decaying(384, 256, 0.3),
    "steep": decaying(384, 256, 1.0),
    "wide": decaying(512, 384, 0.7)[:256],
}


def residual(w: np.ndarray, found) -> np.ndarray:
    """What is left, in the smoothed columns, by float64."""
    smooth, down, up, _ = (None if each is None else each.astype(np.float64) for each in found)
    return (w.astype(np.float64) - up @ down) * smooth


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_left_is_within_a_percent_of_the_best(name):
    w = MATRICES[name].astype(np.float32)
    found, amax = find_correction(in_memory(w), RANK)
    smoothed = torch.from_numpy(w.astype(np.float64) * found.smooth)
    values = torch.linalg.svd(smoothed, full_matrices=False).S
    best = float(values[RANK:].square().sum().sqrt())
    left = residual(w, found)
    assert best * 0.999 <= np.linalg.norm(left) <= best * 1.01
    assert amax == pytest.approx(np.abs(left).max(), rel=1e-4)


def test_smooth_factors_are_those_of_the_pull_request_and_all_numbers_bf16():
    w = MATRICES["steep"].astype(np.float32)
    found, _ = find_correction(in_memory(w), RANK)
    amax = torch.from_numpy(w).abs().amax(0).clamp(min=1e-6)
    assert np.array_equal(found.smooth, (1 / amax.sqrt()).bfloat16().float().numpy())
    assert found.down.shape == (RANK, 256)
    assert found.up.shape == (384, RANK)
    for part in (found.smooth, found.down, found.up):
        assert np.array_equal(torch.from_numpy(part).bfloat16().float().numpy(), part)


def test_every_level_finds_the_same(tmp_path, monkeypatch):
    weights, found = in_memory(MATRICES["flat"]), {}
    for level, cpu in every_level(tmp_path).items():
        for module in (corrected, rounding):
            monkeypatch.setattr(module, "Cpu", lambda cpu=cpu: cpu)
        correction, amax = find_correction(weights, RANK)
        found[level] = [part.tobytes() for part in correction[:3]], amax
    assert len(found) >= 1
    assert all(other == next(iter(found.values())) for other in found.values())


def test_a_matrix_of_less_rank_is_all_correction():
    w = gaussian(256, 5) @ gaussian(5, 128, 1)
    found, amax = find_correction(in_memory(w), RANK)
    # What bf16 rounds off is left, and nothing else.
    assert np.linalg.norm(residual(w, found)) < 2.0**-7 * np.linalg.norm(w * found.smooth)
    assert amax > 0
    assert (
        not found.up[:, 5:].any() or np.abs(found.up[:, 5:]).max() < 1e-3 * np.abs(found.up).max()
    )


def round_corrected(weights):
    linear = Linear("m", weights.shape, FLOATS["F32"], ())
    maker = Corrected(None, linear, None, method_for(TARGET, NVFP4), TARGET.rule_for(NVFP4))
    return maker.rounded(weights, RANK, Tools(None, Cpu()))


def rounded(w: np.ndarray):
    """The correction, and the panels in one: packed codes, block scales, the global scale."""
    weights = in_memory(w)
    correction, panels = round_corrected(weights)
    codes, scales, globals_ = [], [], set()
    for q in panels:
        low_first = np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1)
        codes.append(decode_e2m1(unpack(low_first)))
        every = torch.frombuffer(bytearray(q.block_scales), dtype=torch.uint8)
        scales.append(every.view(torch.float8_e4m3fn).double().numpy().reshape(q.shape[0], -1))
        globals_.add(q.global_scale)
    (global_scale,) = globals_
    return correction, np.concatenate(codes), np.concatenate(scales), global_scale


def ours(w: np.ndarray) -> np.ndarray:
    """The weights that engines compute with, by float64 from what is stored."""
    (smooth, down, up, _), codes, scales, global_scale = rounded(w)
    values = codes.astype(np.float64) * np.repeat(scales, 16, axis=1) * global_scale
    return values / smooth + up.astype(np.float64) @ down.astype(np.float64)


def theirs(w: np.ndarray) -> np.ndarray:
    """The same by the pull request's recipe."""
    weight = torch.from_numpy(w).float()
    smooth = (1 / weight.abs().amax(0).clamp(min=1e-6).sqrt()).clamp(min=1e-6)
    u, s, vh = torch.linalg.svd(weight * smooth, full_matrices=False)
    up, down = u[:, :RANK] * s[:RANK], vh[:RANK]
    left = weight * smooth - up @ down
    blocks = left.reshape(len(w), -1, 16)
    block_scales = blocks.abs().amax(-1).clamp(min=1e-6) / 6
    wtscale = (block_scales.max() / 448).clamp(min=1e-12)
    subscale = (block_scales / wtscale).to(torch.float8_e4m3fn).float()
    q = blocks / (subscale * wtscale).unsqueeze(-1)
    middles = (GRID[1:] + GRID[:-1]) / 2
    codes = GRID[torch.bucketize(q.abs(), middles)] * q.sign()
    values = codes.double() * subscale.double().unsqueeze(-1) * wtscale.bfloat16().double()
    values = values.reshape(weight.shape) / smooth.bfloat16().double()
    return (values + up.bfloat16().double() @ (down / smooth).bfloat16().double()).numpy()


@pytest.mark.parametrize("name", MATRICES)
def test_outputs_are_no_worse_than_by_the_pull_requests_recipe(name):
    w = MATRICES[name].astype(np.float32)
    x = np.random.default_rng(5).standard_normal((w.shape[1], 256))
    # Inputs are large where columns are small, as where smoothing has a use.
    x /= np.sqrt(np.abs(w).max(0))[:, None]
    errors = [np.linalg.norm((made(w) - w) @ x) / np.linalg.norm(w @ x) for made in (ours, theirs)]
    assert errors[0] < errors[1] < 0.12


def test_each_panel_says_what_the_weights_have_lost():
    w = MATRICES["flat"].astype(np.float32)
    weights = in_memory(w)
    _, panels = round_corrected(weights)
    noise = counted = 0.0
    for q in panels:
        sums = np.frombuffer(q.compared.rows, np.float64).reshape(q.shape[0], -1)
        noise += sums[:, 1].sum()
        counted += np.frombuffer(q.compared.counts, np.int64).sum()
    assert noise == pytest.approx(np.square(ours(w) - w).sum(), rel=1e-4)
    assert counted == w.size


def test_the_global_scale_is_a_bf16_that_reaches_every_block():
    _, _, scales, global_scale = rounded(MATRICES["steep"])
    assert float(torch.tensor(global_scale).bfloat16()) == global_scale
    assert scales.max() <= 448


def test_zeros_stay_zeros():
    found, codes, _, global_scale = rounded(np.zeros((128, 128), np.float32))
    assert not codes.any()
    assert not found.up.any()
    assert global_scale == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value):
    w = gaussian(128, 128)
    w[7, 9] = value
    with pytest.raises(NumericError) as error:
        find_correction(in_memory(w), RANK)
    assert error.value.code == "not-finite"
