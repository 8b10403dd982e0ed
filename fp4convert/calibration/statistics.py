"""Read the statistics of a calibration file.

Numbers that nothing can have are refused. calibration_file.py says what the file holds, and opens
it, fingerprint.py says whether it is of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.targets import Correction
from fp4convert.calibration.plausibility import InputStatistics, contradiction, not_a_gram
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.numerics.codec import Float32s
from fp4convert.recipes.patterns import exclude_option
from fp4convert.storage.safetensors import TensorRef

AGAIN = "Calibrate again: fp4convert calibrate SOURCE -o FILE."
GRAM_DIMENSIONS = 3  # (blocks, n, n)
TOKEN_SHARES = (90.0, 99.0, 99.9, 99.99)  # percent of tokens, of input_token_amax
LOSS_KINDS = KL, OUTPUT = "kl", "output"  # what outputs lose: predictions, or all they are
FEW_TOKENS = 16  # with fewer gptq knows too little of a linear layer's inputs,
FEW_SHARE = 1 / 32  # and with fewer than this share of the columns of a block of H
TARGETS = "targets"  # the note of a file with corrections: how quantize rounds with it
COUNTS = (".tokens", ".expert_tokens")  # end names of integers
DTYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
}


class Gram(NamedTuple):
    """The mean of x x^T over tokens, or the blocks along its diagonal.

    blocks   (k, b, b) float32; zeros where the last one reaches beyond `columns`
    columns  of the linear layer
    """

    blocks: Float32s
    columns: int


class Experts(NamedTuple):
    """Statistics of a mixture of experts, expert by expert.

    tokens    number of tokens routed to it
    saliency  mean over these tokens of the router's weight times the norm of the expert's output
              (REAP, arXiv 2510.13999); 0 for none
    """

    tokens: NDArray[np.int64]
    saliency: Float32s


class Calibration(NamedTuple):
    """An open calibration file; statistics are read on demand.

    Readers raise InputError for a missing or impossible statistic.
    sha256  of the file, or of the index with the sha256 of its parts; plans and records name it
    notes   its metadata (calibration_file.py)
    inputs  module -> another module that holds its statistics
    """

    path: Path
    sha256: str
    notes: Mapping[str, str]
    inputs: Mapping[str, str]
    refs: Mapping[str, TensorRef]

    @property
    def samples(self) -> int:
        return int(self.notes["samples"])

    @property
    def tokens(self) -> int:
        """Count the tokens that went through the model."""
        return int(self.notes["tokens"])

    @property
    def gram_kind(self) -> str:
        """Return none, diag, block:N or full."""
        return self.notes["gram"]

    @property
    def usual(self) -> str:
        """Name the statistic that every linear layer with any has."""
        return "input_channel_amax"

    @property
    def has_largest(self) -> bool:
        """Return whether there are largest inputs, which input scales need."""
        return any(name.endswith(".input_amax") for name in self.refs)

    @property
    def has_moments(self) -> bool:
        """Return whether there are mean squares of inputs, which weigh errors."""
        return any(name.endswith(".input_sq_mean") for name in self.refs)

    @property
    def unrouted(self) -> tuple[str, ...]:
        """List the experts with statistics of tokens of other experts."""
        found = parse_note(self.path, self.notes, "unrouted", [])
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def holder(self, module: str) -> str:
        """Return the module that holds its statistics."""
        return self.inputs.get(module, module)

    def has(self, module: str, statistic: str = "") -> bool:
        """Tell whether there is such a statistic of a module.

        statistic  the end of its name; "" for the usual one
        """
        return f"{self.holder(module)}.{statistic or self.usual}" in self.refs

    def gram_widths(self) -> list[tuple[int, int]]:
        """Return (columns, block width) of every Gram matrix, padded."""
        shapes = [ref.shape for name, ref in self.refs.items() if name.endswith(".input_gram")]
        return [
            (shape[0] * shape[-1], shape[-1]) for shape in shapes if len(shape) == GRAM_DIMENSIONS
        ]

    def amax(self, module: str) -> float:
        """Return the largest |x| that the linear layer was given."""
        return self._read_number(module, "input_amax")

    def token_amax(self, module: str, share: float) -> float:
        """Return the largest |x| of one of TOKEN_SHARES of the tokens."""
        values, count = self._read_checked(module, "input_token_amax"), len(TOKEN_SHARES)
        if values.shape != (count,):
            detail = f"has the shape {list(values.shape)}; expected {[count]}"
            raise self.refusal(self.find(module, "input_token_amax"), detail)
        return float(values[TOKEN_SHARES.index(share)])

    def moments(self, module: str) -> Float32s:
        """Return the mean of x^2 of every column, the diagonal of the Gram.

        Files of --gram none have none.
        """
        return self._read_columns(module, "input_sq_mean")

    def mean_magnitudes(self, module: str) -> Float32s:
        """Return the mean of |x| of every column."""
        return self._read_columns(module, "input_abs_mean")

    def channel_amax(self, module: str) -> Float32s:
        """Return the largest |x| of every column."""
        return self._read_columns(module, "input_channel_amax")

    def tokens_of(self, module: str) -> int:
        """Count the tokens that the linear layer was given."""
        return int(self._read_number(module, "tokens"))

    def gram(self, module: str) -> Gram | None:
        """Return the Gram matrix of the inputs, or its blocks.

        None in a file of --gram diag or none.
        """
        if not self.has(module) or not self.has(module, "input_gram"):
            return None
        ref, factor = self._find_gram(module)
        blocks = self._read(ref).astype(np.float32) * factor
        self._check_values(ref, blocks, is_gram=True)
        if why := not_a_gram(blocks):
            raise self.refusal(ref, f"{why}: it is not a mean of x x^T")
        return Gram(blocks, self.find(module, "input_channel_amax").shape[0])

    @property
    def targets(self) -> Mapping[str, object]:
        """Return the settings that its corrections of targets are for.

        format, scale_rule, method and activations; none in a file without corrections
        """
        found = parse_note(self.path, self.notes, TARGETS, {})
        return found if isinstance(found, dict) else {}

    def correction(self, module: str, shape: tuple[int, int]) -> Correction | None:
        """Return how the targets of weights of a shape differ from them, or None."""
        change = self.refs.get(f"{module}.target_change")
        ref = change or self.refs.get(f"{self.holder(module)}.input_correction")
        if ref is None:
            return None
        count, width = ref.shape[0], ref.shape[-1]
        is_fitting = ref.shape == shape if change else (count - 1) * width < shape[1]
        if not is_fitting or not (change or ref.shape == (count, width, width)):
            raise self.refusal(ref, f"has the shape {list(ref.shape)}, beside {list(shape)}")
        values = cast(Float32s, self._read(ref))
        if not np.isfinite(values).all():
            raise self.refusal(ref, "holds NaN or Inf; expected finite statistics")
        return Correction(None, values) if change else Correction(values, None)

    def target_amax(self, module: str) -> float | None:
        """Return the largest target of its scale group; None without corrections."""
        ref = self.refs.get(f"{module}.target_amax")
        if ref is None:
            return None
        values = self._read(ref)
        self._check_values(ref, values)
        return float(values)

    def gram_diagonal(self, module: str) -> Float32s:
        """Return the diagonal of a Gram matrix, and read no more of it."""
        ref, factor = self._find_gram(module)
        file = self.path.parent / ref.file
        mapped = np.memmap(file, self._dtype(ref), "r", ref.start, ref.shape)
        diagonal = np.diagonal(mapped, axis1=1, axis2=2).reshape(-1)
        values = diagonal.astype(np.float32) * factor
        self._check_values(ref, values)
        return cast(Float32s, values)

    def experts(self, moe: str) -> Experts:
        """Return the statistics of a mixture of experts.

        moe  `model.layers.0.mlp`, above its `experts`
        """
        tokens = self._read_checked(moe, "expert_tokens")
        saliency = self._read_checked(moe, "expert_saliency")
        if tokens.shape == saliency.shape and saliency[tokens == 0].any():
            detail = "is above 0 for an expert that no token was routed to"
            raise self.refusal(self.find(moe, "expert_saliency"), detail)
        return Experts(cast(NDArray[np.int64], tokens), saliency)

    @property
    def loss_formats(self) -> tuple[str, ...]:
        """Name the formats of `output_losses`; none in a file without them.

        Raises  InputError for notes that say no kind or number of tokens with them
        """
        found = parse_note(self.path, self.notes, "loss_formats", [])
        is_sound = isinstance(found, list) and all(isinstance(name, str) for name in found)
        is_told = self.loss_kind in LOSS_KINDS and self.notes.get("loss_tokens", "").isdecimal()
        if not is_sound or (found and not is_told):
            detail = f"{self.path}: its metadata does not say what losses it has"
            raise InputError("calibration-file", f"{detail}; expected names of formats", AGAIN)
        return tuple(found) if isinstance(found, list) else ()

    @property
    def loss_kind(self) -> str:
        """Return the kind of `output_losses`: kl, or output."""
        return self.notes.get("loss", "")

    @property
    def loss_tokens(self) -> int:
        """Count the tokens that `output_losses` were measured on."""
        return int(self.notes["loss_tokens"])

    def output_losses(self, module: str) -> dict[str, float] | None:
        """Return a module's share of its part's loss, by format; None if unknown."""
        ref = self.refs.get(f"{module}.output_losses")
        if ref is None:
            return None
        values, names = self._read(ref), self.loss_formats
        self._check_values(ref, values)
        if values.shape != (len(names),):
            detail = f"has the shape {list(values.shape)}; expected a number for every format"
            raise self.refusal(ref, detail)
        return dict(zip(names, map(float, values), strict=True))

    def cache_amax(self, attention: str) -> tuple[float, float]:
        """Return the largest |key|, after its rotation, and |value|.

        attention  into whose cache they went: `model.layers.0.self_attn`
        """
        return self._read_number(attention, "k_amax"), self._read_number(attention, "v_amax")

    def find(self, module: str, statistic: str) -> TensorRef:
        """Find the place of a statistic, or raise InputError."""
        ref = self.refs.get(f"{self.holder(module)}.{statistic}")
        if ref is not None:
            return ref
        next_step = AGAIN
        if statistic.startswith("input_") and not self.has(module):
            next_step = "Calibrate again with text that reaches it"
            next_step += f", or quantize without it: {exclude_option(module)}"
        elif statistic == "input_sq_mean" and self.gram_kind == "none":
            next_step = "Calibrate again with --gram diag."
        detail = f"{self.path} has no {statistic} of {module}"
        detail += "; expected it for every linear layer, MoE layer and attention that is used"
        raise InputError("calibration-missing", detail, next_step, module)

    def refusal(self, ref: TensorRef, why: str) -> InputError:
        """Return the error of a statistic that cannot be."""
        detail = f"{self.path}: {ref.name} {why}"
        return InputError("calibration-values", detail, "Calibrate again.", ref.name)

    def _find_gram(self, module: str) -> tuple[TensorRef, np.float32]:
        """Find a Gram matrix of a fitting shape, and its factor."""
        ref = self.find(module, "input_gram")
        columns = self.find(module, "input_channel_amax").shape[0]
        count, width = (ref.shape[0], ref.shape[-1]) if ref.shape else (0, 0)
        is_square = len(ref.shape) == GRAM_DIMENSIONS and ref.shape[1] == width
        if not is_square or not count * width - width < columns <= count * width:
            detail = f"has the shape {list(ref.shape)}"
            detail += f"; expected square blocks that cover {columns} columns"
            raise self.refusal(ref, detail)
        is_scaled = ref.dtype == "F16"
        return ref, np.float32(self._read_number(module, "input_gram_scale") if is_scaled else 1)

    def _read_columns(self, module: str, statistic: str) -> Float32s:
        """Read a number for every column that the linear layer has."""
        expected = self.find(module, self.usual).shape
        values = self._read_checked(module, statistic)
        if values.shape != expected or len(expected) != 1:
            detail = f"has the shape {list(values.shape)}; expected a number for every column"
            raise self.refusal(self.find(module, statistic), detail)
        return values

    def _read_number(self, module: str, statistic: str) -> float:
        found = self._read_checked(module, statistic)
        if found.shape:
            detail = f"has the shape {list(found.shape)}; expected a single number"
            raise self.refusal(self.find(module, statistic), detail)
        return float(found)

    def _read_checked(self, module: str, statistic: str) -> Float32s:
        ref = self.find(module, statistic)
        values = self._read(ref)
        self._check_values(ref, values)
        return cast(Float32s, values)

    def _read(self, ref: TensorRef) -> NDArray[np.generic]:
        file = self.path.parent / ref.file
        values = np.fromfile(file, self._dtype(ref), ref.elements, offset=ref.start)
        if values.size != ref.elements:
            raise self.refusal(ref, "is gone: the file became shorter while it was read")
        return values.reshape(ref.shape)

    def _dtype(self, ref: TensorRef) -> np.dtype[np.generic]:
        """Return numpy's dtype: of integers for counts, else of floats."""
        expected = ("I64",) if ref.name.endswith(COUNTS) else ("F32", "F16")
        if ref.dtype not in expected:
            detail = f"has the dtype {ref.dtype}; expected {' or '.join(expected)}"
            raise self.refusal(ref, detail)
        return DTYPES[ref.dtype]

    def _check_values(
        self, ref: TensorRef, values: NDArray[np.generic], is_gram: bool = False
    ) -> None:
        """Refuse NaN, Inf and negative values; of a Gram its diagonal counts."""
        if not np.isfinite(values).all():
            raise self.refusal(ref, "holds NaN or Inf; expected finite statistics")
        lowest = np.diagonal(values, axis1=-2, axis2=-1) if is_gram else values
        if lowest.size and lowest.min() < 0:
            detail = "holds negative values where counts, squares or magnitudes are expected"
            raise self.refusal(ref, detail)


def check_linears(calibration: Calibration, linears: Iterable[Linear]) -> None:
    """Raise InputError for a linear layer without plausible statistics."""
    holders: set[str] = set()
    for linear in linears:
        ref = calibration.find(linear.module, calibration.usual)
        if ref.shape != linear.shape[1:]:
            detail = f"{calibration.path}: {ref.name} has the shape {list(ref.shape)}"
            detail += f"; expected {[linear.shape[1]]}"
            next_step = "Calibrate this source: fp4convert calibrate."
            raise InputError("calibration-shape", detail, next_step, linear.module)
        holder = calibration.holder(linear.module)
        if holder not in holders:
            holders.add(holder)
            check_inputs(calibration, linear.module)


def check_inputs(calibration: Calibration, module: str) -> None:
    """Raise InputError for contradicting statistics of a layer's inputs."""
    has = calibration.has
    if not has(module, "input_channel_amax"):
        calibration.moments(module)
        return
    largest = calibration.channel_amax(module)
    found = contradiction(
        InputStatistics(
            tokens=calibration.tokens_of(module) if has(module, "tokens") else None,
            amax=calibration.amax(module) if has(module, "input_amax") else None,
            largest=largest,
            magnitudes=(
                calibration.mean_magnitudes(module) if has(module, "input_abs_mean") else None
            ),
            squares=calibration.moments(module) if has(module, "input_sq_mean") else None,
            diagonal=calibration.gram_diagonal(module) if has(module, "input_gram") else None,
        )
    )
    if found:
        statistic, why = found
        ref = calibration.find(module, statistic)
        raise calibration.refusal(ref, f"{why}: no inputs have both")


def parse_note(path: Path, notes: Mapping[str, str], key: str, absent: object) -> object:
    """Parse the JSON of one note; `absent` without the note."""
    if key not in notes:
        return absent
    try:
        return json.loads(notes[key])
    except (ValueError, RecursionError):
        detail = f"{path}: its metadata holds no JSON under {key!r}"
        raise InputError("calibration-file", detail, "Calibrate again.") from None


def has_few_tokens(calibration: Calibration, module: str) -> bool:
    """Tell whether a module saw too few tokens for gptq.

    Files of others, which do not count them, have enough.
    """
    if not calibration.has(module, "tokens"):
        return False
    width = calibration.find(module, "input_gram").shape[-1]
    return are_few(calibration.tokens_of(module), width)


def are_few(tokens: int, width: int) -> bool:
    """Tell whether tokens are too few for gptq, by the width of a block of H."""
    return tokens < max(FEW_TOKENS, FEW_SHARE * width)
