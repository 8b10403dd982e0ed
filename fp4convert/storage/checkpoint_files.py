"""Names of files: shards, indexes, records, and files beside them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fp4convert.errors import InputError, shell_line
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header

# In a folder that fp4convert writes: the plan being carried out, or carried out.
PLAN_FILE = ".fp4convert/plan.json"
HUB_FILE = ".fp4convert/hub.json"  # the repository that holds the shards

CONFIG = "config.json"
RECORD = "quantization_config.json"
ENGINE_RECORD = "hf_quant_config.json"  # ModelOpt's readers need it beside config.json

CARD = "README.md"  # the model card: for people, who edit it
REPORT = "quantization_report.json"  # how much was lost: error_report.py
SIGNATURE = "model.sig"  # of all other files, as the package model-signing names it
DERIVATION = "derivation.json"  # what attest states that the artifact was made from
PAGE = "report.html"  # of --report, where it travels with the artifact
ATTESTED = (SIGNATURE, DERIVATION)  # of the files beside them alone
UNDIGESTED = frozenset(
    {CARD, REPORT, PAGE, DERIVATION}
)  # no engine reads them, and no digest counts them

GGUF = ".gguf"

# As transformers and as Diffusers name them.
SINGLES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
INDEX = ".index.json"  # end of the name of an index
INDEXES = tuple(f"{single}{INDEX}" for single in SINGLES)
PIPELINE = "model_index.json"  # Diffusers' list of folders of components with their classes
CONVERTED = "transformer"  # begin of the names of components to convert
WEIGHTS = ".safetensors"
# A variant's: model.safetensors.index.fp16.json.
OTHER_INDEX = re.compile(r"[^/]*\.safetensors\.index\.\w+\.json")
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d{1,9})\.safetensors")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # as llama-gguf-split names them
UNFINISHED = "A conversion into this folder did not end: run its command again, which continues."
MOST_NAMED = 20  # folders in a message
OTHER_WEIGHTS = frozenset(
    {
        *(".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data"),
        *(".ot", ".pkl", ".npz"),
    }
)
ORIGINAL = "original/"  # the maker's own copy of the weights: Llama, gpt-oss
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def holds_weights(file: str) -> bool:
    """Return whether a file of that name holds weights, in any form."""
    return os.path.splitext(file)[1].lower() in {WEIGHTS, *OTHER_WEIGHTS}


def recorded_hashes(record: Mapping[str, object]) -> dict[str, str]:
    """Return the sha256 of each file in our record, without unsound entries."""
    files = record.get("files")
    entries = files.items() if isinstance(files, dict) else ()
    return {file: sha256 for file, sha256 in entries if isinstance(sha256, str)}


def no_subfolder(where: object, subfolder: str, folders: Iterable[str]) -> InputError:
    """Return the error for a missing subfolder; `folders` are there."""
    there = sorted(folders)
    some = ", ".join(there[:MOST_NAMED])
    if len(there) > MOST_NAMED:
        some += f" and {len(there) - MOST_NAMED} more"
    detail = f"{where} has no folder {subfolder!r}; it has {some or 'no folders'}"
    next_step = "Choose one: --subfolder FOLDER." if there else "Leave --subfolder out."
    return InputError("no-subfolder", detail, next_step)


def index_file(shards: Iterable[str]) -> str:
    """Return the name of the index of such shards, as its library names it."""
    stem = SINGLES[1].removesuffix(WEIGHTS)
    return INDEXES[1] if any(shard.startswith(stem) for shard in shards) else INDEXES[0]


def find_index(names: Collection[str]) -> str | None:
    """Find the index among those files; raise InputError for two."""
    found = [index for index in INDEXES if index in names]
    if len(found) > 1:
        raise InputError(
            "index",
            f"the folder holds both {' and '.join(found)}; expected one",
            "Remove the one that does not belong.",
        )
    return found[0] if found else None


def read_index(text: bytes, index: str = INDEXES[0]) -> dict[str, str]:
    """Read and check tensor name -> shard of an index."""
    weight_map = parse_json_object(text, f"{index}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("index", f"{index}: no weight_map that maps tensors to files")
    sound: set[object] = set()
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in sound:
            continue
        if not isinstance(file, str):
            detail = f"{index}: weight_map gives {file!r} for {tensor!r}; expected a file name"
            raise InputError("index", detail)
        found = f"{index}: {tensor!r} is listed in {file!r}"
        if len(PurePosixPath(file).parts) != 1 or file in (".", "..") or "\0" in file:
            detail = f"{found}, outside the folder; expected a name in it"
            raise InputError("index-outside", detail)
        if not file.endswith(WEIGHTS):
            raise InputError("index", f"{found}; expected a {WEIGHTS} file")
        sound.add(file)
    files = set(weight_map.values())
    folded = Counter(file.lower() for file in files)
    if twins := sorted(file for file in files if folded[file.lower()] > 1):
        found = f"{index}: weight_map names {twins[0]!r} and {twins[1]!r}"
        detail = f"{found}, which differ only in case; expected names that any file system"
        next_step = "Rename one, in the index too."
        raise InputError("index", f"{detail} keeps apart", next_step)
    return dict(weight_map)


def find_homes(shards: Sequence[Header]) -> dict[str, str]:
    """Return tensor name -> shard; raise InputError for one in two shards."""
    homes = {ref.name: shard.file for shard in shards for ref in shard.tensors}
    if len(homes) < sum(len(shard.tensors) for shard in shards):
        first: dict[str, str] = {}
        for ref in (ref for shard in shards for ref in shard.tensors):
            if ref.name in first:
                found = f"{ref.name!r} is in two shards, {first[ref.name]} and {ref.file}"
                next_step = "Remove the file that does not belong."
                raise InputError("tensor-twice", f"{found}; expected one", next_step, ref.name)
            first[ref.name] = ref.file
    return homes


def check_index(homes: dict[str, str], weight_map: dict[str, str], index: str) -> tuple[str, ...]:
    """Return the tensors that an index lacks.

    homes   by `find_homes`
    Raises  InputError if the index contradicts the headers
    """
    if homes == weight_map:
        return ()
    for tensor, file in weight_map.items():
        if homes.get(tensor) != file:
            detail = f"{index}: {tensor!r} is not in {file}, where the index says it is"
            raise InputError("index", detail, tensor=tensor)
    return tuple(tensor for tensor in homes if tensor not in weight_map)


def gguf_parts(file: str, names: Collection[str]) -> list[str]:
    """Return the files of a GGUF model: itself, or all its parts.

    file   one of them, or the name of the model in parts
    names  of the files in the folder
    """
    first = PART.fullmatch(file) or next(
        (
            part
            for name in sorted(names)
            if (part := PART.fullmatch(name)) and _joined(name) == file
        ),
        None,
    )
    if first is None or (file in names and not PART.fullmatch(file)):
        return [file]
    count = int(first[3])
    parts = [f"{first[1]}-{number:05d}-of-{first[3]}{GGUF}" for number in range(1, count + 1)]
    if missing := [part for part in parts if part not in names]:
        detail = f"{missing[0]} is missing, one of the {count} parts of {first[1]}{GGUF}"
        raise InputError("gguf-split", f"{detail}; expected all of them in one folder")
    return parts


def _joined(name: str) -> str:
    """Return the name of the model that a GGUF file, or a part, holds."""
    return f"{part[1]}{GGUF}" if (part := PART.fullmatch(name)) else name


def choose_shards(
    where: object,
    names: Collection[str],
    weight_map: dict[str, str] | None,
    may_lack: bool = False,
) -> list[str]:
    """Choose the files of the checkpoint: by the index, else as engines do.

    where     the place, for messages
    names     of the files in the folder
    may_lack  accept fewer shards than their names say
    """
    found = sorted(name for name in names if name.endswith(WEIGHTS))
    if not found:
        found = sorted({_joined(name) for name in names if name.endswith(GGUF)})
        if len(found) == 1:
            return gguf_parts(found[0], names)
        if found:
            detail = f"{where}: {len(found)} GGUF files, the first {found[0]}; expected one"
            repository = str(where).partition(" ")[0]
            next_step = f"Choose one: {shell_line(f'{repository}/{found[0]}')}"
            if isinstance(where, Path):
                next_step = f"Choose one: {shell_line(where / found[0])}"
            raise InputError("gguf", f"{detail}, each is a model of its own", next_step)
    single = next((single for single in SINGLES if single in found), None)
    if weight_map is not None:
        listed = set(weight_map.values())
        if single in set(found) - listed:
            detail = f"the folder holds both {single} and {find_index(names)}"
            detail += ", which does not name it; expected one of them"
            next_step = "Remove the one that does not belong."
            raise InputError("index-and-single", detail, next_step)
        for missing in sorted(listed - set(names)):
            detail = f"{missing} is missing, the index names it"
            if not (beside := sorted(set(found) - listed)):
                raise InputError("missing-shard", detail)
            index = find_index(names)
            detail += f", and not {len(beside)} that are there, the first {beside[0]}"
            next_step = (
                f"Download the missing file; or remove {index}, if the others are the model."
            )
            raise InputError("missing-shard", detail, next_step)
        return sorted(listed)

    # Without an index; names may say that there are more shards.
    shards = [single] if single else found
    sets = Counter(
        (match[1], int(match[3])) for name in shards if (match := NUMBERED.fullmatch(name))
    )
    for (stem, expected), count in sets.items():
        if count < expected and not may_lack:
            detail = f"{stem}*{WEIGHTS}: {count} shards, whose names say that there are {expected}"
            next_step = "Download the whole checkpoint again."
            if PLAN_FILE.partition("/")[0] in names:
                next_step = UNFINISHED
            raise InputError("missing-shard", f"{detail}; there is no index either", next_step)
    return shards


def no_weights(where: object, names: Iterable[str], next_step: str = "") -> InputError:
    """Return the error for a place without readable weights."""
    if {os.path.splitext(name)[1] for name in names} & PICKLES:
        return InputError(
            "pickle",
            f"{where}: only pickle weights (.bin, .pt), which run code when they are loaded;"
            " expected safetensors",
            "Convert them first, in a sandbox: save_pretrained of transformers writes safetensors.",
        )
    if PIPELINE in names:
        return InputError(
            "no-weights",
            f"{where}: {PIPELINE} names no {CONVERTED}, and next to it is no safetensors file",
            "Name the folder of the checkpoint: --subfolder unet, for example.",
        )
    expected = "expected model.safetensors or shards with an index"
    return InputError("no-weights", f"{where}: no safetensors file; {expected}", next_step)


def sort_others(
    files: Iterable[str], shards: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the files beside the shards: to copy, and weights to leave out."""
    sidecars: list[str] = []
    left_out: list[str] = []
    for file in files:
        if file not in shards and file not in (CONFIG, *INDEXES):
            is_root_weight = "/" not in file and (
                file.endswith(WEIGHTS) or OTHER_INDEX.fullmatch(file)
            )
            is_original = file.startswith(ORIGINAL) and file.endswith((WEIGHTS, INDEX))
            is_other = os.path.splitext(file)[1] in OTHER_WEIGHTS
            (left_out if is_root_weight or is_original or is_other else sidecars).append(file)
    return tuple(sidecars), tuple(left_out)


def find_components(text: bytes, folders: Collection[str]) -> tuple[str, ...]:
    """Return the folders of transformers in a model_index.json."""
    components = []
    for key, value in sorted(parse_json_object(text, PIPELINE).items()):
        # [library, class]; an absent component is [null, null].
        kinds = [type(word) for word in value] if isinstance(value, list) else []
        if key.startswith(CONVERTED) and kinds == [str, str]:
            components.append(key)
    for missing in (component for component in components if component not in folders):
        detail = f"{PIPELINE} names {missing!r}, and there is no such folder"
        next_step = "Download it again."
        raise InputError("missing-component", f"{detail}; expected the whole pipeline", next_step)
    return tuple(components)


def sort_pipeline(
    files: Iterable[str], components: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the files outside the components, as sort_others does."""
    outside = [file for file in files if file.partition("/")[0] not in components]
    left_out = [file for file in outside if "/" not in file and holds_weights(file)]
    return tuple(file for file in outside if file not in left_out), tuple(left_out)
