"""Tell which model and which weights a checkpoint holds.

Norms, biases and whatever else is small is hashed whole, since a fine-tune may change nothing else;
of large tensors samples are.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable

from fp4convert.calibration.statistics import Calibration, check_linears
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.module_names import split_numbers
from fp4convert.checkpoint.record import ADAPTER
from fp4convert.errors import InputError
from fp4convert.storage.json_text import unquantized
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Checkpoint, Source, read_each

SMALL_NBYTES, SAMPLE_NBYTES = 64 << 10, 4096
SMALL_TENSORS, SAMPLES = 2048, 1024  # that are read: each may be two requests to the Hub
TENSOR_SAMPLES = 16  # of a large tensor, where few others are


def fingerprint_of(source: Source) -> str:
    """Hash which model it is.

    Returns  the sha256 of its config.json, less quantization, and of the name and shape of every
             tensor
    """
    checkpoint = source.checkpoint
    tensors = sorted((ref.name, ref.shape) for ref in checkpoint.tensors)
    text = json.dumps([unquantized(checkpoint.config), tensors], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def weights_of(source: Source) -> str:
    """Hash the identity of the weights of a model.

    Returns  the sha256 of names and sizes of shards, and of the ranges of `telling_ranges`
    Raises   SourceError if they cannot be read
    """
    found = hashlib.sha256()
    for shard in source.checkpoint.shards:
        found.update(f"{shard.file} {shard.nbytes}\n".encode("utf-8", "surrogatepass"))

    def read(place: TensorRef) -> bytearray:
        data = bytearray(place.nbytes)
        source.read_into(place, 0, memoryview(data))
        return data

    for data in read_each(source, read, telling_ranges(source.checkpoint)):
        found.update(data)
    return found.hexdigest()


def check_source(
    calibration: Calibration,
    source: Source,
    linears: Iterable[Linear] = (),
    adapter: str | None = None,
) -> None:
    """Raise InputError for a calibration of another checkpoint.

    linears  to check with check_linears, too
    adapter  key of the adapter that the source is merged with; a calibration of the base model is
             accepted, and plans warn
    """
    path, next_step = calibration.path, "Calibrate it: fp4convert calibrate SOURCE -o FILE."
    if "fingerprint" not in calibration.notes:  # of another tool: names and widths tell
        check_linears(calibration, linears)
        return
    if fingerprint_of(source) != calibration.notes["fingerprint"]:
        detail = f"{path} was made from another model than {source.name}"
        detail += ": names, shapes or config.json differ"
        raise InputError("calibration-model", detail, next_step)
    if weights_of(source) != calibration.notes["weights"]:
        detail = f"{path} was made from other weights of the same model as {source.name}"
        detail += ": another revision or a fine-tune"
        raise InputError("calibration-weights", detail, next_step)
    merged = calibration.notes.get(ADAPTER)
    if merged and merged != adapter:
        detail = f"{path} was made with {'another' if adapter else 'an'} adapter"
        step = "Name it: --lora ADAPTER, and its --lora-scale."
        if adapter:
            step = "Calibrate with this one: fp4convert calibrate SOURCE --lora ADAPTER -o FILE."
        raise InputError("calibration-weights", f"{detail}; expected this model's", step)
    check_linears(calibration, linears)


def telling_ranges(checkpoint: Checkpoint) -> list[TensorRef]:
    """List the ranges of tensors to hash, in the order of the files.

    Headers alone decide: at most SMALL_TENSORS small tensors whole, and SAMPLES pieces of large
    ones, from the middle of a tensor.
    """
    refs = [ref for ref in checkpoint.tensors if ref.nbytes]
    small = _choose((ref for ref in refs if ref.nbytes <= SMALL_NBYTES), SMALL_TENSORS)
    large = _choose((ref for ref in refs if ref.nbytes > SMALL_NBYTES), SAMPLES)
    count = min(TENSOR_SAMPLES, SAMPLES // max(1, len(large)))
    pieces = []
    for ref in large:
        for number in range(count):  # evenly over the tensor
            start = ref.start + (ref.nbytes - SAMPLE_NBYTES) * (2 * number + 1) // (2 * count)
            pieces.append(ref._replace(dtype="U8", shape=(SAMPLE_NBYTES,), start=start))
    order = {shard.file: number for number, shard in enumerate(checkpoint.shards)}
    return sorted([*small, *pieces], key=lambda ref: (order[ref.file], ref.start))


def _choose(refs: Iterable[TensorRef], most: int) -> list[TensorRef]:
    """Choose tensors of every kind of name.

    All of kinds that have few, and as many as these leave from all over the others.
    """
    kinds: dict[tuple[str, ...], list[TensorRef]] = defaultdict(list)
    for ref in refs:
        kinds[split_numbers(ref.name)[0]].append(ref)
    found: list[TensorRef] = []
    for done, own in enumerate(sorted(kinds.values(), key=len)):
        count = min(len(own), (most - len(found)) // (len(kinds) - done))
        found += [own[number * len(own) // count] for number in range(count)]
    return found
