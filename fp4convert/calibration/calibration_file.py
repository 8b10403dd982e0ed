"""Open a calibration file, and check its headers and notes.

One safetensors file, or an index in JSON whose parts lie beside it.  Its notes (the file's
__metadata__, or the index's `metadata`) are strings:

  format       fp4convert-calibration        version  2
  source       {"repo", "revision"} as JSON, null for a folder
  fingerprint  sha256 of config.json less quantization, and of every tensor's name and shape: which
               model
  weights      sha256 of its small tensors and of samples of its large ones: which weights of it
  samples, tokens, text, gram   how many, how they were fed, and none | diag | block:N | full
  inputs       {module: module that holds its statistics} as JSON, for layers that are given the
               same input
  unrouted     experts whose statistics are those of tokens that were not routed to them, a JSON
               list
  loss, loss_formats, loss_tokens   of calibrate --sensitivity: kl (nats a token) or output (squared
               error over the square), a JSON list of formats, on how many tokens
  targets      format, method, activations and scale_rule as JSON, where targets are corrected: then
               statistics of inputs are those of the quantized prefix, as engines round them
  parts        {file: sha256} as JSON, of an index alone

and its tensors, by the names of linear layers (experts are modules of their own), attentions and
mixtures of experts:

  {module}.input_amax          F32 []                largest |x|
  {module}.input_sq_mean       F32 [columns]         mean of x^2 over tokens
  {module}.input_abs_mean      F32 [columns]         mean of |x|
  {module}.input_channel_amax  F32 [columns]         largest |x| of each column
  {module}.input_token_amax    F32 [4]               largest |x| of 90, 99, 99.9, 99.99 % of tokens
  {module}.input_gram          F32, F16 [k, b, b]    mean of x x^T along the diagonal; the last
                                                     block is padded with zeros
  {module}.input_gram_scale    F32 []                of an F16 Gram: what it is multiplied with
  {module}.input_correction    F32 [k, b, b]         D: targets of rounding are W + W D
  {module}.target_change       F32 [rows, columns]   what targets have more than W, in its place
  {module}.target_amax         F32 []                largest target of its scale group
  {module}.tokens              I64 []                tokens seen
  {module}.output_losses       F32 [formats]         its share of what the outputs lose where its
                                                     part alone is rounded to each format
  {moe}.expert_tokens          I64 [experts]
  {moe}.expert_saliency        F32 [experts]
  {attention}.k_amax, .v_amax  F32 []

statistics.py reads the numbers, workdir.py writes such files, and run.py makes what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from fp4convert.calibration.statistics import AGAIN, Calibration, parse_note
from fp4convert.errors import InputError
from fp4convert.storage.disk import hash_file, open_regular
from fp4convert.storage.gguf import is_imatrix
from fp4convert.storage.json_text import parse_json_object, read_text_file
from fp4convert.storage.safetensors import SafetensorsFrame, TensorRef, read_header

FORMAT, VERSION = "fp4convert-calibration", "2"
ANEW = "Copy it again from where it was made, or calibrate again."  # nobody downloads such files
HEAD_NBYTES = 1 << 16  # of a file, in which it says what it is
COUNT_DIGITS = 18  # of a count of samples or tokens
NOTES = ("source", "fingerprint", "weights", "samples", "tokens", "gram", "text")


def is_calibration(path: Path | str) -> bool:
    """Tell by its first bytes whether a file says that it is a calibration.

    False for a folder, and for what cannot be read
    """
    try:
        with open_regular(Path(path), -1) as stream:
            return FORMAT.encode() in stream.read(HEAD_NBYTES)
    except (OSError, ValueError):
        return False


def open_calibration(path: Path | str) -> Calibration:
    """Open a calibration file, and check its headers and notes.

    Raises InputError where it is not there, damaged, or something else
    """
    path = Path(path)
    try:
        with open_regular(path) as stream:
            head = stream.read(8)
            if is_imatrix(head):
                from fp4convert.calibration.imatrix import open_imatrix

                return open_imatrix(path)
        is_index = head.startswith(b"{") and b"\0" not in head
        text = read_text_file(path).encode() if is_index else b""
    except UnicodeDecodeError as error:
        detail = f"{path}: not UTF-8 at byte {error.start}; expected one JSON object"
        raise InputError("header-utf8", detail, ANEW) from None
    except OSError as error:
        detail = f"{path}: {error.strerror}; expected a file that fp4convert calibrate made"
        next_step = "Make it: fp4convert calibrate SOURCE -o FILE."
        raise InputError("calibration-file", detail, next_step) from None
    # The notes; of an index they are strings in JSON.
    tensors: list[TensorRef] = []
    if is_index:
        try:
            metadata = parse_json_object(text, str(path)).get("metadata")
        except InputError as error:
            raise InputError(error.code, error.message, ANEW) from None
        entries = metadata.items() if isinstance(metadata, dict) else ()
        notes = {key: value for key, value in entries if isinstance(value, str)}
    else:
        notes, refs = header_of(path)
        tensors += refs
    form, version = notes.get("format"), notes.get("version")
    if (form, version) != (FORMAT, VERSION):
        detail = f"{path} says that it is {form!r}, version {version!r}"
        detail += f"; expected {FORMAT!r}, version {VERSION!r}"
        next_step = AGAIN if form == FORMAT else "Give a file that fp4convert calibrate made."
        raise InputError("calibration-file", detail, next_step)
    if is_index:
        tensors += _read_parts(path, _map_note(path, notes, "parts"))
    # Notes that every calibration has, and those that are numbers.
    bad = [key for key in NOTES if key not in notes]
    counts = ((key, notes.get(key, "")) for key in ("samples", "tokens"))
    bad += [key for key, count in counts if not count.isdecimal() or len(count) > COUNT_DIGITS]
    if bad:
        detail = f"{path}: its metadata lacks {bad[0]!r}, or has no number there"
        raise InputError("calibration-file", detail, "Calibrate again.")
    inputs = _map_note(path, notes, "inputs")
    return Calibration(path, hash_file(path), notes, inputs, {ref.name: ref for ref in tensors})


def header_of(path: Path) -> tuple[dict[str, str], tuple[TensorRef, ...]]:
    """Read the notes of a safetensors file, and the places of its tensors."""
    try:
        with open_regular(path, -1) as stream:

            def read(offset: int, length: int) -> bytes:
                stream.seek(offset)
                return stream.read(length)

            header = read_header(path.name, path.stat().st_size, read)
    except OSError as error:
        detail = f"{path}: {error.strerror}; expected a part of the calibration"
        next_step = "Keep the index and its parts in one folder."
        raise InputError("calibration-file", detail, next_step) from None
    except InputError as error:
        raise InputError(error.code, error.message, ANEW) from None
    return cast(SafetensorsFrame, header.frame).metadata, header.tensors


def _read_parts(path: Path, sums: Mapping[str, str]) -> list[TensorRef]:
    """Read the places of tensors in the parts of an index, by their sha256."""
    if away := [file for file in sums if not file or Path(file).name != file or "\0" in file]:
        detail = f"{path} is an index that names {away[0]!r}; expected files in its folder"
        raise InputError("calibration-file", detail, ANEW)
    tensors = [ref for file in sorted(sums) for ref in header_of(path.parent / file)[1]]
    other = [file for file, sha256 in sums.items() if hash_file(path.parent / file) != sha256]
    if other or not sums:
        detail = f"{path} is an index that names no parts; expected files in its folder"
        if other:
            detail = f"{path} is an index, and {other[0]} in its folder belongs to another"
            detail += " calibration: its sha256 differs"
        next_step = "Keep the index and its parts in one folder, or calibrate again."
        raise InputError("calibration-file", detail, next_step)
    return tensors


def _map_note(path: Path, notes: Mapping[str, str], key: str) -> dict[str, str]:
    """Parse an object of strings in a note; empty without the note."""
    found = parse_note(path, notes, key, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        detail = f"{path}: {key!r} of its metadata does not map names to names"
        raise InputError("calibration-file", detail, "Calibrate again.")
    return found
