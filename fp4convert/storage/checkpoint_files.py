"""Names of files: shards, indexes, records, and what lies beside."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

from fp4convert.errors import InputError
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header

PLAN_FILE = ".fp4convert/plan.json"  # in a folder that fp4convert writes: the plan being carried out, or carried out

RECORD = "quantization_config.json"

CARD = "README.md"  # the model card: for people, who edit it
REPORT = "quantization_report.json"  # how much was lost: error_report.py
UNDIGESTED = frozenset({CARD, REPORT})  # no engine reads them, and no digest counts them

GGUF = ".gguf"

SINGLES = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
)  # as transformers and as Diffusers name them
INDEXES = tuple(f"{single}.index.json" for single in SINGLES)
PIPELINE = "model_index.json"  # of Diffusers: which folders are its components, and of which class
CONVERTED = "transformer"  # how the names begin of components that are checkpoints to convert
WEIGHTS = ".safetensors"
OTHER_INDEX = re.compile(
    r"[^/]*\.safetensors\.index\.\w+\.json"
)  # of a variant: model.safetensors.index.fp16.json
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d{1,9})\.safetensors")
MOST_NAMED = 20  # folders that a message names
OTHER_WEIGHTS = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pkl", ".npz"}
)
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def no_subfolder(where: object, subfolder: str, folders: Iterable[str]) -> InputError:
    """The error for a subfolder that is not there; `folders` are."""
    there = sorted(folders)
    some = ", ".join(there[:MOST_NAMED]) + (
        f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else ""
    )
    detail = f"{where} has no folder {subfolder!r}; it has {some or 'no folders'}"
    return InputError(
        "no-subfolder",
        detail,
        "Choose one: --subfolder FOLDER." if there else "Leave --subfolder out.",
    )


def index_file(shards: Iterable[str]) -> str:
    """The name of the index of such shards: Diffusers' where they are named so, else transformers'."""
    stem = SINGLES[1].removesuffix(WEIGHTS)
    return INDEXES[1] if any(shard.startswith(stem) for shard in shards) else INDEXES[0]


def find_index(names: Collection[str]) -> str | None:
    """The index among those files; InputError where there are two."""
    found = [index for index in INDEXES if index in names]
    if len(found) > 1:
        raise InputError(
            "index",
            f"the folder holds both {' and '.join(found)}; expected one",
            "Remove the one that does not belong.",
        )
    return found[0] if found else None


def read_index(text: bytes, index: str = INDEXES[0]) -> dict[str, str]:
    """Tensor name -> shard of an index, checked; raises InputError."""
    weight_map = parse_json_object(text, f"{index}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("index", f"{index}: no weight_map that maps tensors to files")
    sound: set[object] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in sound:
            _check_shard_name(tensor, file, index)
            sound.add(file)
    files = set(weight_map.values())
    folded = Counter(file.lower() for file in files)
    if twins := sorted(file for file in files if folded[file.lower()] > 1):
        detail = (
            f"{index}: weight_map names {twins[0]!r} and {twins[1]!r}, which differ only in case"
        )
        raise InputError(
            "index",
            f"{detail}; expected names that any file system keeps apart",
            "Rename one, in the index too.",
        )
    return dict(weight_map)


def _check_shard_name(tensor: str, file: object, index: str) -> None:
    if not isinstance(file, str):
        raise InputError(
            "index", f"{index}: weight_map gives {file!r} for {tensor!r}; expected a file name"
        )
    if len(PurePosixPath(file).parts) != 1 or file in (".", "..") or "\0" in file:
        raise InputError(
            "index-outside",
            f"{index}: {tensor!r} is said to lie in {file!r}, outside the folder; expected a name in it",
        )
    if not file.endswith(".safetensors"):
        raise InputError(
            "index", f"{index}: {tensor!r} is said to lie in {file!r}; expected a .safetensors file"
        )


def find_homes(shards: Sequence[Header]) -> dict[str, str]:
    """Tensor name -> the shard that holds it; InputError when two do."""
    homes = {ref.name: shard.file for shard in shards for ref in shard.tensors}
    if len(homes) < sum(len(shard.tensors) for shard in shards):
        first: dict[str, str] = {}
        for ref in (ref for shard in shards for ref in shard.tensors):
            if ref.name in first:
                detail = (
                    f"{ref.name!r} is in two shards, {first[ref.name]} and {ref.file}; expected one"
                )
                raise InputError(
                    "tensor-twice", detail, "Remove the file that does not belong.", ref.name
                )
            first[ref.name] = ref.file
    return homes


def check_index(homes: dict[str, str], weight_map: dict[str, str], index: str) -> tuple[str, ...]:
    """The tensors that an index omits, of those that `find_homes` found; InputError where it contradicts the headers."""
    if homes == weight_map:
        return ()
    for tensor, file in weight_map.items():
        if homes.get(tensor) != file:
            raise InputError(
                "index", f"{index}: {tensor!r} is not in {file}, where the index says it is"
            )
    return tuple(tensor for tensor in homes if tensor not in weight_map)


def choose_shards(
    where: object, names: Collection[str], weight_map: dict[str, str] | None
) -> list[str]:
    """The files that are the checkpoint, of those beside one another: what the index names, or else what engines read.

    where   how messages name the place
    Raises  InputError where there are none, or where names contradict the index
    """
    found = sorted(name for name in names if name.endswith(WEIGHTS)) or sorted(
        name for name in names if name.endswith(GGUF)
    )
    if len(found) > 1 and found[0].endswith(GGUF):
        detail = f"{where}: {len(found)} GGUF files, the first {found[0]}; expected one, each is a model of its own"
        raise InputError("gguf", detail, f"Choose one: {where}/{found[0]}.")
    single = next((single for single in SINGLES if single in found), None)
    unlisted = [single] if single else found  # without an index, as engines read a folder
    if weight_map is not None and single in set(found) - set(weight_map.values()):
        detail = f"the folder holds both {single} and {find_index(names)}, which does not name it; expected one of them"
        raise InputError("index-and-single", detail, "Remove the one that does not belong.")
    if weight_map is None:
        _check_complete(unlisted)
    shards = unlisted if weight_map is None else sorted(set(weight_map.values()))
    for missing in sorted(set(shards) - set(names)):
        raise InputError(
            "missing-shard", f"{missing} is missing, the index names it", "Download the file again."
        )
    return shards


def _check_complete(shards: Sequence[str]) -> None:
    """InputError where names say that a checkpoint has more shards than there are, and no index says otherwise."""
    sets: dict[tuple[str, int], int] = {}
    for name in shards:
        if match := NUMBERED.fullmatch(name):
            key = match[1], int(match[3])
            sets[key] = sets.get(key, 0) + 1
    for (stem, expected), found in sets.items():
        if found < expected:
            detail = f"{stem}*{WEIGHTS}: {found} shards, whose names say that there are {expected}; there is no index either"
            raise InputError("missing-shard", detail, "Download the whole checkpoint again.")


def no_weights(where: object, names: Iterable[str]) -> InputError:
    """The error for a place without weights that can be read."""
    detail = f"{where}: no safetensors file; expected model.safetensors or shards with an index"
    if {os.path.splitext(name)[1] for name in names} & PICKLES:
        detail = f"{where}: only pickle weights (.bin, .pt), which run code when they are loaded; expected safetensors"
        return InputError(
            "pickle",
            detail,
            "Convert them first, in a sandbox: save_pretrained of transformers writes safetensors.",
        )
    if PIPELINE in names:
        detail = (
            f"{where}: {PIPELINE} names no {CONVERTED}, and there is no safetensors file beside it"
        )
        return InputError(
            "no-weights",
            detail,
            "Name the folder of the checkpoint: --subfolder unet, for example.",
        )
    return InputError("no-weights", detail)


def sort_others(
    files: Iterable[str], shards: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of all files beside the shards, those that travel unchanged, and weights in another form, which stay behind."""
    sidecars: list[str] = []
    left_out: list[str] = []
    for file in files:
        if file not in shards and file not in ("config.json", *INDEXES):
            is_root_weight = "/" not in file and (
                file.endswith(WEIGHTS) or OTHER_INDEX.fullmatch(file)
            )
            is_weight = is_root_weight or os.path.splitext(file)[1] in OTHER_WEIGHTS
            (left_out if is_weight else sidecars).append(file)
    return tuple(sidecars), tuple(left_out)


def find_components(text: bytes, folders: Collection[str]) -> tuple[str, ...]:
    """The folders that a model_index.json names as transformers; InputError where one of them is not there."""
    named = parse_json_object(text, PIPELINE)
    components = tuple(
        sorted(
            key
            for key, value in named.items()
            if key.startswith(CONVERTED) and _is_component(value)
        )
    )
    for missing in (component for component in components if component not in folders):
        detail = f"{PIPELINE} names {missing!r}, and there is no such folder; expected the whole pipeline"
        raise InputError("missing-component", detail, "Download it again.")
    return components


def _is_component(value: object) -> bool:
    """True for [library, class]; a component that a pipeline does without is [null, null]."""
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)
    )


def sort_pipeline(
    files: Iterable[str], components: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of all files outside the components, those that travel unchanged, and weights in no folder, which stay behind."""
    outside = [file for file in files if file.partition("/")[0] not in components]
    left_out = [
        file
        for file in outside
        if "/" not in file and os.path.splitext(file)[1] in {WEIGHTS, *OTHER_WEIGHTS}
    ]
    return tuple(file for file in outside if file not in left_out), tuple(left_out)
