"""Read and check a calibration file.

One safetensors file, or an index in JSON whose parts lie beside it.  Its notes (the file's __metadata__,
or the index's `metadata`) are strings:

  format       fp4convert-calibration        version  2
  source       {"repo", "revision"} as JSON, null for a folder
  fingerprint  sha256 of config.json less quantization, and of every tensor's name and shape: which model
  weights      sha256 of its small tensors and of samples of its large ones: which weights of it
  samples, tokens, text, gram   how many, how they were fed, and none | diag | block:N | full
  inputs       {module: module that holds its statistics} as JSON, for layers that are given the same input
  unrouted     experts whose statistics are those of tokens that were not routed to them, a JSON list
  parts        {file: sha256} as JSON, of an index alone

and its tensors, by the names of linear layers (experts are modules of their own), attentions and mixtures of experts:

  {module}.input_amax          F32 []                largest |x|
  {module}.input_sq_mean       F32 [columns]         mean of x^2 over tokens
  {module}.input_abs_mean      F32 [columns]         mean of |x|
  {module}.input_channel_amax  F32 [columns]         largest |x| of each column
  {module}.input_gram          F32, F16 [k, b, b]    mean of x x^T along the diagonal, the last block padded with zeros
  {module}.input_gram_scale    F32 []                of an F16 Gram: what it is multiplied with
  {module}.tokens              I64 []                tokens seen
  {moe}.expert_tokens I64 [experts]        {moe}.expert_saliency F32 [experts]        {attention}.k_amax, .v_amax F32 []

This module reads and checks such files; workdir.py writes them, and run.py makes what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.fingerprint import fingerprint_of, weights_of
from fp4convert.calibration.plausibility import Seen, contradiction, not_a_gram
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.numerics.codec import Float32s
from fp4convert.storage.disk import hash_file
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import SafetensorsFrame, TensorRef
from fp4convert.storage.safetensors_header import read_header
from fp4convert.storage.source import Source

FORMAT, VERSION = "fp4convert-calibration", "2"
AGAIN = "Calibrate again: fp4convert calibrate SOURCE -o FILE."
ANEW = "Copy it anew from where it was made, or calibrate again."  # nobody downloads such files
GRAM_DIMENSIONS = 3  # (blocks, n, n)
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
    """What a mixture of experts did with the tokens, expert by expert.

    tokens    how many were routed to it
    saliency  mean over these of the router's weight times the norm of the expert's output (REAP, arXiv 2510.13999); 0 for none
    """

    tokens: NDArray[np.int64]
    saliency: Float32s


@dataclass(frozen=True, slots=True)
class Calibration:
    """An opened calibration file; statistics are read when they are asked for.

    sha256  of the file, or of the index, which holds those of its parts: what plans and records call it by
    notes   its metadata, as the head of this module has it
    inputs  module -> the module that holds its statistics, where that is another
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
        """Tokens that went through the model."""
        return int(self.notes["tokens"])

    @property
    def gram_kind(self) -> str:
        """none, diag, block:N or full."""
        return self.notes["gram"]

    @property
    def unrouted(self) -> tuple[str, ...]:
        """Modules of experts that got too few tokens, and whose statistics are those of other tokens."""
        found = _parsed(self.path, self.notes, "unrouted") if "unrouted" in self.notes else []
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def check(self, source: Source, linears: Iterable[Linear] = ()) -> None:
        """InputError where the file is not of this very checkpoint, or has nothing on one of these linear layers."""
        again = f"Calibrate it: fp4convert calibrate {source.name} -o FILE."
        if fingerprint_of(source) != self.notes["fingerprint"]:
            detail = f"{self.path} was made from another model than {source.name}: names, shapes or config.json differ"
            raise InputError("calibration-model", detail, again)
        if weights_of(source) != self.notes["weights"]:
            detail = f"{self.path} was made from other weights of the same model as {source.name}: another revision or a fine-tune"
            raise InputError("calibration-weights", detail, again)
        self.check_linears(linears)

    def check_linears(self, linears: Iterable[Linear]) -> None:
        """InputError where the file has nothing on one of these linear layers, something of another shape, or what cannot be."""
        holders: set[str] = set()
        for linear in linears:
            ref = self._ref(linear.module, "input_channel_amax")
            if ref.shape != linear.shape[1:]:
                detail = f"{self.path}: {ref.name} has the shape {list(ref.shape)}; expected {[linear.shape[1]]}"
                raise InputError(
                    "calibration-shape",
                    detail,
                    "Calibrate this source: fp4convert calibrate.",
                    linear.module,
                )
            if self.holder(linear.module) not in holders:
                holders.add(self.holder(linear.module))
                self.check_inputs(linear.module)

    def check_inputs(self, module: str) -> None:
        """InputError where what is said of the inputs of that linear layer cannot be, or not all of it at once."""
        largest = self.channel_amax(module)
        seen = Seen(
            tokens=self.tokens_of(module) if self._has(module, "tokens") else None,
            amax=self.amax(module) if self._has(module, "input_amax") else None,
            largest=largest,
            magnitudes=self.mean_magnitudes(module)
            if self._has(module, "input_abs_mean")
            else None,
            squares=self.moments(module) if self._has(module, "input_sq_mean") else None,
            diagonal=self._diagonal(module) if self.has_gram(module) else None,
        )
        if found := contradiction(seen):
            kind, why = found
            raise self._bad(self._ref(module, kind), f"{why}: no inputs have both")

    def holder(self, module: str) -> str:
        """The module under whose name its statistics stand: itself, or another that is given the same input."""
        return self.inputs.get(module, module)

    def has(self, module: str) -> bool:
        """True where there are statistics on the inputs of that linear layer."""
        return self._has(module, "input_channel_amax")

    def has_gram(self, module: str) -> bool:
        """True where there is a Gram matrix of the inputs of that linear layer."""
        return self._has(module, "input_gram")

    def has_experts(self, moe: str) -> bool:
        """True where there is something to judge the experts of that mixture by."""
        return self._has(moe, "expert_saliency")

    def has_cache(self, attention: str) -> bool:
        """True where it is known what entered the cache of that attention."""
        return self._has(attention, "k_amax")

    def gram_widths(self) -> list[tuple[int, int]]:
        """(columns, columns of a block) of every Gram matrix in the file, those of its padding with them."""
        shapes = [ref.shape for name, ref in self.refs.items() if name.endswith(".input_gram")]
        return [
            (shape[0] * shape[-1], shape[-1]) for shape in shapes if len(shape) == GRAM_DIMENSIONS
        ]

    def amax(self, module: str) -> float:
        """The largest |x| that the linear layer was given."""
        return self._number(module, "input_amax")

    def moments(self, module: str) -> Float32s:
        """The mean of x^2 of every column: the diagonal of the Gram matrix.  InputError in a file of --gram none."""
        return self._columns(module, "input_sq_mean")

    def mean_magnitudes(self, module: str) -> Float32s:
        """The mean of |x| of every column."""
        return self._columns(module, "input_abs_mean")

    def channel_amax(self, module: str) -> Float32s:
        """The largest |x| of every column."""
        return self._columns(module, "input_channel_amax")

    def tokens_of(self, module: str) -> int:
        """How many tokens the linear layer was given."""
        return int(self._number(module, "tokens"))

    def gram(self, module: str) -> Gram | None:
        """The Gram matrix of the inputs, or its blocks; None in a file of --gram diag or none."""
        if not self.has(module) or not self.has_gram(module):
            return None
        ref = self._gram_ref(module)
        blocks = self._read(ref).astype(np.float32) * self._gram_scale(module)
        self._check(ref, blocks, may_be_negative=True)
        if why := not_a_gram(blocks):
            raise self._bad(ref, f"{why}: it is no mean of x x^T")
        return Gram(blocks, self._ref(module, "input_channel_amax").shape[0])

    def experts(self, moe: str) -> Experts:
        """What became of the tokens in a mixture of experts: `model.layers.0.mlp`, above its `experts`."""
        tokens, saliency = (
            self._positive(moe, "expert_tokens"),
            self._positive(moe, "expert_saliency"),
        )
        if tokens.shape == saliency.shape and saliency[tokens == 0].any():
            raise self._bad(
                self._ref(moe, "expert_saliency"),
                "is above 0 for an expert that no token was routed to",
            )
        return Experts(cast(NDArray[np.int64], tokens), saliency)

    def cache_amax(self, attention: str) -> tuple[float, float]:
        """The largest |key|, after its rotation, and |value| that entered the cache of `model.layers.0.self_attn`."""
        return self._number(attention, "k_amax"), self._number(attention, "v_amax")

    def _has(self, module: str, kind: str) -> bool:
        return f"{self.holder(module)}.{kind}" in self.refs

    def _ref(self, module: str, kind: str) -> TensorRef:
        ref = self.refs.get(f"{self.holder(module)}.{kind}")
        if ref is None:
            detail = f"{self.path} has no {kind} of {module}; expected it of every linear layer, mixture and attention asked for"
            raise InputError("calibration-missing", detail, self._remedy(module, kind), module)
        return ref

    def _remedy(self, module: str, kind: str) -> str:
        """What to do where that statistic of it is missing."""
        if kind.startswith("input_") and not self.has(module):
            return f"Calibrate again with text that reaches it, or quantize without it: --exclude '{module}'."
        if kind == "input_sq_mean" and self.gram_kind == "none":
            return "Calibrate again with --gram diag."
        return AGAIN

    def _gram_ref(self, module: str) -> TensorRef:
        """Where the Gram matrix is; InputError where it has the shape of none of that linear layer."""
        ref, columns = (
            self._ref(module, "input_gram"),
            self._ref(module, "input_channel_amax").shape[0],
        )
        count, width = ref.shape[0] if ref.shape else 0, ref.shape[-1] if ref.shape else 0
        if (
            len(ref.shape) != GRAM_DIMENSIONS
            or ref.shape[1] != width
            or not count * width - width < columns <= count * width
        ):
            raise self._bad(
                ref,
                f"has the shape {list(ref.shape)}; expected square blocks that cover {columns} columns",
            )
        return ref

    def _gram_scale(self, module: str) -> np.float32:
        return np.float32(
            self._number(module, "input_gram_scale")
            if self._ref(module, "input_gram").dtype == "F16"
            else 1
        )

    def _diagonal(self, module: str) -> Float32s:
        """That of a Gram matrix, and nothing else of it is read."""
        ref = self._gram_ref(module)
        mapped = np.memmap(self.path.parent / ref.file, self._dtype(ref), "r", ref.start, ref.shape)
        values = np.diagonal(mapped, axis1=1, axis2=2).reshape(-1).astype(
            np.float32
        ) * self._gram_scale(module)
        self._check(ref, values)
        return cast(Float32s, values)

    def _columns(self, module: str, kind: str) -> Float32s:
        """A number for every column that the linear layer has."""
        expected = self._ref(module, "input_channel_amax").shape
        values = self._positive(module, kind)
        if values.shape != expected or len(expected) != 1:
            raise self._bad(
                self._ref(module, kind),
                f"has the shape {list(values.shape)}; expected a number for every column",
            )
        return values

    def _positive(self, module: str, kind: str) -> Float32s:
        ref = self._ref(module, kind)
        values = self._read(ref)
        self._check(ref, values)
        return cast(Float32s, values)

    def _number(self, module: str, kind: str) -> float:
        found = self._positive(module, kind)
        if found.shape:
            raise self._bad(
                self._ref(module, kind),
                f"has the shape {list(found.shape)}; expected a single number",
            )
        return float(found)

    def _dtype(self, ref: TensorRef) -> np.dtype[np.generic]:
        """Of numpy; InputError for counts that are no integers, and for statistics that are."""
        expected = ("I64",) if ref.name.endswith(COUNTS) else ("F32", "F16")
        if ref.dtype not in expected:
            raise self._bad(ref, f"has the dtype {ref.dtype}; expected {' or '.join(expected)}")
        return DTYPES[ref.dtype]

    def _read(self, ref: TensorRef) -> NDArray[np.generic]:
        values = np.fromfile(
            self.path.parent / ref.file, self._dtype(ref), ref.elements, offset=ref.start
        )
        if values.size != ref.elements:
            raise self._bad(ref, "is gone: the file became shorter while it was read")
        return values.reshape(ref.shape)

    def _check(
        self, ref: TensorRef, values: NDArray[np.generic], may_be_negative: bool = False
    ) -> None:
        """InputError for NaN, Inf, and what is negative and cannot be; of a Gram matrix that is its diagonal."""
        if not np.isfinite(values).all():
            raise self._bad(ref, "holds NaN or Inf; expected finite statistics")
        lowest = np.diagonal(values, axis1=-2, axis2=-1) if may_be_negative else values
        if lowest.size and lowest.min() < 0:
            raise self._bad(
                ref, "holds negative values where counts, squares or magnitudes are expected"
            )

    def _bad(self, ref: TensorRef, found: str) -> InputError:
        return InputError(
            "calibration-values", f"{self.path}: {ref.name} {found}", "Calibrate again.", ref.name
        )


def open_calibration(path: Path | str) -> Calibration:
    """A calibration file, its headers read and checked; InputError where it is not there, damaged, or something else."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
        is_index = head.startswith(b"{") and b"\0" not in head
        text = path.read_bytes() if is_index else b""
    except OSError as error:
        detail = f"{path}: {error.strerror}; expected a file that fp4convert calibrate made"
        raise InputError(
            "calibration-file", detail, "Make it: fp4convert calibrate SOURCE -o FILE."
        ) from None
    headers = [] if is_index else [header_of(path)]
    notes = _index_notes(path, text) if is_index else headers[0][0]
    _check_format(path, notes)
    if is_index:
        sums = _mapping(path, notes, "parts")
        headers = [header_of(path.parent / file) for file in sorted(sums)]
        _check_parts(path, sums)
    _check_notes(path, notes)
    refs = {ref.name: ref for _, found in headers for ref in found}
    return Calibration(path, hash_file(path), notes, _mapping(path, notes, "inputs"), refs)


def _index_notes(path: Path, text: bytes) -> dict[str, str]:
    try:
        return _strings(parse_json_object(text, str(path)).get("metadata"))
    except InputError as error:
        raise InputError(error.code, error.message, ANEW) from None


def header_of(path: Path) -> tuple[dict[str, str], tuple[TensorRef, ...]]:
    """The notes of a safetensors file, and where its tensors are."""
    try:
        with path.open("rb") as stream:

            def read(offset: int, length: int) -> bytes:
                stream.seek(offset)
                return stream.read(length)

            header = read_header(path.name, path.stat().st_size, read)
    except OSError as error:
        detail = f"{path}: {error.strerror}; expected a part of the calibration"
        raise InputError(
            "calibration-file", detail, "Keep the index and its parts in one folder."
        ) from None
    except InputError as error:
        raise InputError(error.code, error.message, ANEW) from None
    return cast(SafetensorsFrame, header.frame).metadata, header.tensors


def _check_parts(path: Path, sums: Mapping[str, str]) -> None:
    """InputError where a part that lies beside an index is not the one that was written with it."""
    other = [file for file, sha256 in sums.items() if hash_file(path.parent / file) != sha256]
    if other or not sums:
        if other:
            detail = f"{path} is an index, and {other[0]} beside it belongs to another calibration: its sha256 differs"
        else:
            detail = f"{path} is an index that names no parts; expected files that lie beside it"
        raise InputError(
            "calibration-file",
            detail,
            "Keep the index and its parts in one folder, or calibrate again.",
        )


def _check_format(path: Path, notes: Mapping[str, str]) -> None:
    """InputError for a file of something else, and for a calibration of another version."""
    form, version = notes.get("format"), notes.get("version")
    if (form, version) != (FORMAT, VERSION):
        detail = f"{path} says that it is {form!r}, version {version!r}; expected {FORMAT!r}, version {VERSION!r}"
        next_step = AGAIN if form == FORMAT else "Give a file that fp4convert calibrate made."
        raise InputError("calibration-file", detail, next_step)


def _strings(found: object) -> dict[str, str]:
    entries = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in entries if isinstance(value, str)}


def _check_notes(path: Path, notes: Mapping[str, str]) -> None:
    wanted = ("source", "fingerprint", "weights", "samples", "tokens", "gram", "text")
    missing = [key for key in wanted if key not in notes]
    odd = [key for key in ("samples", "tokens") if not notes.get(key, "").isdecimal()]
    if missing or odd:
        detail = f"{path}: its metadata lacks {(missing or odd)[0]!r}, or has no number there"
        raise InputError("calibration-file", detail, "Calibrate again.")


def _parsed(path: Path, notes: Mapping[str, str], key: str) -> object:
    """The JSON of one note."""
    try:
        return json.loads(notes[key])
    except (KeyError, ValueError, RecursionError):
        raise InputError(
            "calibration-file",
            f"{path}: its metadata holds no JSON under {key!r}",
            "Calibrate again.",
        ) from None


def _mapping(path: Path, notes: Mapping[str, str], key: str) -> dict[str, str]:
    """An object of strings in a note; empty where there is no such note."""
    found = _parsed(path, notes, key) if key in notes else {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InputError(
            "calibration-file",
            f"{path}: {key!r} of its metadata does not map names to names",
            "Calibrate again.",
        )
    return found
