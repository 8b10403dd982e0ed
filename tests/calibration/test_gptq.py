"""GPTQ's algebra beside GPTQ as its paper has it, in float64 and written here, and beside
ModelOpt's.
"""

import subprocess
import sys

import numpy as np
import pytest
from calibrations import statistics_of
from cpu_levels import every_level
from gptq_reference import E2M1, gptq_by_the_paper, nearest
from made_up_inputs import correlated

from fp4convert.calibration.methods import gptq
from fp4convert.errors import NumericError
from fp4convert.numerics import codec
from fp4convert.numerics.formats import MXFP4, NVFP4

torch = pytest.importorskip("torch")

BOTH = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])


@pytest.fixture(autouse=True)
def _one_thread():
    with gptq.one_thread():
        yield


def case_of(fmt, columns=192, rows=48, seed=0):
    """Weights, inputs, and the steps of ordinary rounding."""
    x = correlated(columns, 3 * columns, seed).astype(np.float64)
    w = np.random.default_rng(seed + 1).standard_normal((rows, columns), dtype=np.float32)
    steps = codec.block_steps(codec.quantize(w, fmt, fmt.scale_rules[0])).reshape(rows, -1)
    return w, x, steps


def gram_of(x, width=0):
    return statistics_of("m", x, width or x.shape[1])["m.input_gram"]


def whole(blocks, columns):
    """The matrix that has these blocks along its diagonal, and zeros elsewhere."""
    count, width, _ = blocks.shape
    h = np.zeros((count * width, count * width))
    for number, block in enumerate(blocks):
        part = slice(number * width, (number + 1) * width)
        h[part, part] = block
    return h[:columns, :columns]


def values_of(codes, steps):
    wide = np.repeat(steps.astype(np.float64), codes.shape[1] // steps.shape[1], axis=1)
    return E2M1[codes] * wide


def output_error(codes, steps, w, h):
    """Mean squared error of outputs, for inputs with these second moments."""
    difference = values_of(codes, steps) - w
    return float(np.einsum("ri,ij,rj->", difference, h, difference))


def check_equal(found, expected, steps, w, h):
    """The same codes; where a sum in float32 tips one over, outputs that are as good to a
    millionth.
    """
    same = np.mean(found == expected)
    assert same > 0.995
    ours, theirs = output_error(found, steps, w, h), output_error(expected, steps, w, h)
    assert ours == pytest.approx(theirs, rel=1e-6 if same == 1 else 1e-2)


@BOTH
@pytest.mark.parametrize(("columns", "rows"), [(32, 1), (64, 3), (192, 48), (320, 16)])
def test_the_whole_matrix_as_the_paper_has_it(fmt, columns, rows):
    w, x, steps = case_of(fmt, columns, rows)
    blocks = gram_of(x)
    found = gptq.round_columns(w, steps, gptq.factorize(blocks, columns, "cpu"))
    expected = gptq_by_the_paper(w, blocks[0].astype(np.float64), steps)
    assert np.array_equal(found, expected)
    h = x.T @ x / len(x)
    nearest_error = output_error(nearest_codes(w, steps), steps, w, h)
    assert output_error(found, steps, w, h) < 0.7 * nearest_error


def nearest_codes(w, steps):
    return nearest(w / np.repeat(steps, w.shape[1] // steps.shape[1], axis=1))


@pytest.mark.sweep(3)
@BOTH
@pytest.mark.parametrize(
    ("columns", "width"), [(192, 64), (192, 128), (224, 128), (96, 128), (160, 32)]
)
def test_blocks_along_the_diagonal_as_the_paper_has_that_matrix(fmt, columns, width):
    """Also where the last block is padded, and where the order of columns mixes only within a
    block.
    """
    w, x, steps = case_of(fmt, columns)
    blocks = gram_of(x, width)
    found = gptq.round_columns(w, steps, gptq.factorize(blocks, columns, "cpu"))
    expected = gptq_by_the_paper(w, whole(blocks, columns).astype(np.float64), steps)
    check_equal(found, expected, steps, w, x.T @ x / len(x))


@BOTH
def test_many_columns_lazily_and_in_parts_of_the_inverse(fmt, monkeypatch):
    w, x, steps = case_of(fmt, 288, 8)
    monkeypatch.setattr(gptq, "LAZY_COLUMNS", 40)
    monkeypatch.setattr(gptq, "INVERSE_COLUMNS", 100)
    blocks = gram_of(x)
    found = gptq.round_columns(w, steps, gptq.factorize(blocks, 288, "cpu"))
    expected = gptq_by_the_paper(w, blocks[0].astype(np.float64), steps)
    check_equal(found, expected, steps, w, x.T @ x / len(x))


@pytest.mark.sweep(2)
@BOTH
def test_modelopt_gives_the_same(fmt):
    """Its GPTQ knows no order of columns: it is given them in order."""
    calib_utils = pytest.importorskip("modelopt.torch.quantization.utils.calib_utils")
    w, x, steps = case_of(fmt)
    blocks = gram_of(x)
    order = np.argsort(-np.diag(blocks[0]), kind="stable")
    wide = np.repeat(steps, fmt.block_size, axis=1)[:, order]

    def rounded(weights):
        return torch.from_numpy((E2M1[nearest(weights.numpy() / wide)] * wide).astype(np.float32))

    theirs = torch.from_numpy(w[:, order].copy())
    hessian = torch.from_numpy(blocks[0][np.ix_(order, order)].copy())
    calib_utils.gptq_blockwise_update(
        theirs, calib_utils.compute_hessian_inverse(hessian, theirs, 0.05), 128, rounded
    )
    found = gptq.round_columns(w, steps, gptq.factorize(blocks, w.shape[1], "cpu"))
    expected = np.empty_like(found)
    expected[:, order] = nearest(theirs.numpy() / wide)
    found[found == 8] = 0  # a zero's sign is lost on their way back
    check_equal(found, expected, steps, w, x.T @ x / len(x))


@BOTH
@pytest.mark.parametrize("width", [192, 64])
def test_inputs_that_know_nothing_of_each_other_are_rounded_to_the_nearest(fmt, width):
    """And zeros, which a Gram matrix has of columns that saw nothing."""
    w, _, steps = case_of(fmt)
    for diagonal in (1.0, 1e-6, 3e7, 0.0):
        blocks = np.repeat(diagonal * np.eye(width, dtype=np.float32)[None], 192 // width, axis=0)
        found = gptq.round_columns(w, steps, gptq.factorize(blocks, 192, "cpu"))
        assert np.array_equal(found, nearest_codes(w, steps))


@BOTH
def test_columns_that_saw_only_zeros_are_rounded_to_the_nearest_and_change_no_other(fmt):
    w, x, steps = case_of(fmt)
    dead = np.arange(192) % 5 == 3
    x[:, dead] = 0
    blocks = gram_of(x)
    found = gptq.round_columns(w, steps, gptq.factorize(blocks, 192, "cpu"))
    assert np.array_equal(found[:, dead], nearest_codes(w, steps)[:, dead])
    damping = 0.05 * np.mean(~dead)  # of the whole diagonal, zeros and all
    h = blocks[0][np.ix_(~dead, ~dead)].astype(np.float64)
    wide = np.repeat(steps, fmt.block_size, axis=1)[:, ~dead]
    expected = gptq_by_the_paper(w[:, ~dead], h, wide, damping)
    check_equal(found[:, ~dead], expected, wide, w[:, ~dead], h)


def test_a_matrix_that_lacks_a_little_gets_more_damping():
    """An eigenvalue of -0.1 of the mean: 0.05 is too little, four times as much is enough."""
    w, x, steps = case_of(NVFP4)
    values, vectors = np.linalg.eigh(gram_of(x)[0].astype(np.float64))
    values[0] = -0.1 * values.mean()
    h = (vectors * values) @ vectors.T
    found = gptq.round_columns(w, steps, gptq.factorize(h[None].astype(np.float32), 192, "cpu"))
    check_equal(found, gptq_by_the_paper(w, h, steps, 0.2), steps, w, h)


def test_only_the_block_that_lacks_gets_more_damping():
    _, x, _ = case_of(NVFP4)
    blocks = gram_of(x, 64)
    mean = np.trace(whole(blocks, 192)) / 192
    blocks[1] -= (np.linalg.eigvalsh(blocks[1].astype(np.float64))[0] + 0.1 * mean) * np.eye(
        64, dtype=np.float32
    )
    factor = gptq.factorize(blocks, 192, "cpu")
    mean = np.trace(whole(blocks, 192)) / 192
    for number, damping in enumerate((0.05, 0.2, 0.05)):
        order = np.argsort(-np.diag(blocks[number]), kind="stable")
        u = factor.upper[number].double().numpy()
        expected = np.linalg.inv(
            blocks[number].astype(np.float64)[np.ix_(order, order)] + damping * mean * np.eye(64)
        )
        assert np.abs(u.T @ u - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("lowest", [-0.9, -30.0])
def test_a_matrix_that_is_not_positive_definite_is_refused(lowest):
    _, x, _ = case_of(NVFP4)
    values, vectors = np.linalg.eigh(gram_of(x)[0].astype(np.float64))
    values[0] = lowest * values.mean()
    with pytest.raises(
        NumericError, match=r"not positive definite, even with 0\.80 of its mean diagonal"
    ):
        gptq.factorize(((vectors * values) @ vectors.T)[None].astype(np.float32), 192, "cpu")


def test_codes_are_those_of_the_codec():
    """Every midpoint and its neighbours, both signs, subnormals, what saturates, and infinity."""
    ends = [1e30, np.inf, 1e-45, 1e-38]
    points = np.r_[0:2:0.25, 2:4:0.5, 4:8, ends].astype(np.float32)
    below, above = (np.nextafter(points, np.float32(side)) for side in (0, 9))
    around = np.concatenate([points, below, above])
    q = np.concatenate([around, -around])
    steps = np.ones((len(q), 1), np.float32)
    factor = gptq.factorize(np.eye(16, dtype=np.float32)[None], 16, "cpu")
    finite = np.abs(q) < 1e38
    found = gptq.round_columns(np.repeat(q[finite][:, None], 16, axis=1), steps[finite], factor)
    assert np.array_equal(found[:, 0], nearest(q[finite]))
    assert np.array_equal(gptq.nearest(torch.from_numpy(q)).numpy(), np.abs(E2M1[nearest(q)]))


def test_quotients_are_divided_as_ieee_does():
    """On midpoints, times steps of any bits: a product with the reciprocal would round some of them
    to the other side.
    """
    chance = np.random.default_rng(0)
    steps = chance.uniform(0.5, 1, (4000, 1)).astype(np.float32)
    x = chance.choice(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), (4000, 16)) * steps
    assert not np.array_equal(nearest(x / steps), nearest(x * (1 / steps)))
    factor = gptq.factorize(np.eye(16, dtype=np.float32)[None], 16, "cpu")
    assert np.array_equal(gptq.round_columns(x, steps, factor), nearest(x / steps))


@BOTH
@pytest.mark.parametrize(("columns", "rows", "width"), [(320, 131, 320), (224, 67, 128)])
def test_columns_in_c_are_torch_s_to_the_last_bit(fmt, columns, rows, width, monkeypatch, tmp_path):
    """Tiles that rows do not fill, padded blocks, and what later columns make up for."""
    w, x, steps = case_of(fmt, columns, rows)
    factor = gptq.factorize(gram_of(x, width), columns, "cpu")
    by_level = []
    for cpu in every_level(tmp_path).values():
        monkeypatch.setattr(gptq, "Cpu", lambda cpu=cpu: cpu)
        by_level.append(gptq.round_columns(w, steps, factor))
    monkeypatch.setattr(gptq, "_round_group", gptq._round_group_on_gpu)
    expected = gptq.round_columns(w, steps, factor)
    assert np.array_equal(by_level[-1], expected)
    for codes in by_level:  # a processor without fused products adds otherwise
        check_equal(codes, expected, steps, w, x.T @ x / len(x))


def test_the_number_of_torch_threads_is_put_back():
    before = torch.get_num_threads()
    with gptq.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


PEAK = """
import numpy as np, torch
from fp4convert.calibration.methods import gptq

def peak():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

with gptq.one_thread():
    factor = gptq.factorize(np.eye(16, dtype=np.float32)[None], 16, "cpu")
    gptq.round_columns(np.ones((64, 16), np.float32), np.ones((64, 1), np.float32), factor)
    before = peak()
    x = np.random.default_rng(0).standard_normal((32, 3072), dtype=np.float32)
    factor = gptq.factorize((x.T @ x)[None], 3072, "cpu")
    gptq.round_columns(np.ones((2730, 3072), np.float32), np.ones((2730, 192), np.float32), factor)
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_memory_of_a_factor_is_what_is_foretold():
    command = [sys.executable, "-c", PEAK]
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.5 * gptq.held_nbytes(3072, 3072) < measured < 1.1 * gptq.held_nbytes(3072, 3072)
