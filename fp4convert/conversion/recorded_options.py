"""Write options into a record, read them again, and check recorded hashes.

quantize writes its options, and reproduce makes the artifact again from them. A source that is an
artifact has to be what its record says.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fp4convert.checkpoint.artifact import read_json
from fp4convert.checkpoint.record import OPTIONS, TRANSCODED
from fp4convert.errors import InputError, shell_line
from fp4convert.execution.settings import Settings
from fp4convert.numerics.formats import NVFP4
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.plan import Plan
from fp4convert.process import processors
from fp4convert.recipes.options import Declared, declared_in
from fp4convert.recipes.recipe import Target
from fp4convert.storage.checkpoint_files import PLAN_FILE, RECORD, UNDIGESTED, recorded_hashes
from fp4convert.storage.disk import SHA256_DIGITS, hash_file, hash_stream
from fp4convert.storage.json_text import parse_json_object, read_text_file
from fp4convert.storage.open import GGUF_FILE, REPOSITORY, Place, page_of, read_reference
from fp4convert.storage.source import Access, Source, subfolder_of

# Options whose value may be a file: a name, a number or ORG/NAME is said as it is.
FILES = ("base", "calibration", "lora", "global_scale", "input_scale", "recipe", "config")
WHERE = ("revision", "subfolder")  # in a repository
SIZE = re.compile(r"\d\.\d{16}e[+-]\d\d")  # as --target-size is written


def options_recorded(
    options: QuantizeOptions, source: Source, target: Target, plan: Plan | None = None
) -> dict[str, object]:
    """Return what a record says of the options that the bytes depend on.

    plan  with what was taken of folders and repositories; None where only the size counts
    """
    taken = dict.fromkeys(FILES, "0" * SHA256_DIGITS)
    if plan is not None:
        told: dict[str, Callable[[], object]] = {
            "base": lambda: plan.base and plan.base.taken,
            "lora": lambda: plan.adapter and sorted(plan.adapter.sha256.items()),
            "global_scale": lambda: plan.amaxes,
            "input_scale": lambda: plan.scalars,
            "config": lambda: source.checkpoint.config,
        }
        for name, values in told.items():
            if getattr(options, name):
                text = json.dumps(values(), sort_keys=True)
                taken[name] = hashlib.sha256(text.encode()).hexdigest()
    recorded = as_recorded(options, target.calibration, taken)
    if not source.checkpoint.repo:  # the folder itself is named again
        recorded.pop("subfolder", None)
    elif (file := GGUF_FILE.fullmatch(os.fspath(options.source))) and file[2]:
        folder = "/".join(filter(None, (options.subfolder, file[2])))
        recorded["subfolder"] = subfolder_of(Access(subfolder=folder))
    return recorded


def as_recorded(
    options: QuantizeOptions, calibration: str | None = None, taken: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Return the options that are not their defaults, without a path.

    Of a file its sha256, and of a folder or a repository that of what is taken of it, for a path is
    nobody's business.

    calibration  the sha256 of the file of statistics, which may be large, where it is known
    taken        such hashes, by option
    """
    declared, given = _declared(), _given(options)
    given |= {"calibration": {"sha256": calibration}} if calibration else {}
    for name, value in given.items():  # 6 and 6.0 are one number
        if value is not None and declared[name].type == float | None:
            given[name] = float(str(value))
    if options.target_size is not None:  # equally long for every size, which it is part of
        given["target_size"] = f"{options.target_size:.16e}"
    return {
        name: _described(name, value, (taken or {}).get(name))
        for name, value in given.items()
        # 0 is a number that somebody gave, and equals False.
        if value is not None
        and value is not False
        and value != ()
        and value != declared[name].default
    }


def read_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record by name, files as they are described.

    Raises  InputError for what quantize does not write there
    """
    makes_bytes = _given(QuantizeOptions("", format=NVFP4.name)).keys()
    known = {name: each for name, each in _declared().items() if name in makes_bytes}
    read = {name: value for name, value in record[OPTIONS].items() if name != TRANSCODED}
    size = read.get("target_size")
    if isinstance(size, str) and SIZE.fullmatch(size):
        read["target_size"] = float(size)
    for name, value in read.items():
        declared = known.get(name)
        if declared is not None and declared.option.is_several:
            entries = value if isinstance(value, list) and value else [None]
        else:
            entries = [value]
        if declared is None or not all(_is_written(declared, entry) for entry in entries):
            detail = f"{RECORD}: its {OPTIONS} have {name!r}: {str(value)[:80]!r}"
            detail = f"{detail}, which this version of quantize does not write"
            raise InputError("not-reproducible", detail, "Install the version that made it.")
    return read


def options_like(options: QuantizeOptions) -> QuantizeOptions:
    """Return options with those of --like where none was given.

    Raises  InputError where it holds no record of quantize's options
    """
    if options.like is None:
        return options
    path = Path(options.like)
    path = path / RECORD if path.is_dir() else path
    expected = f"expected an artifact of quantize, or its {RECORD}"
    try:
        record = parse_json_object(read_text_file(path).encode(), str(path))
    except (OSError, ValueError, InputError) as error:
        raise InputError("no-record", f"--like {options.like}: {error}; {expected}") from None
    if not isinstance(record.get(OPTIONS), dict):
        detail = f"--like {options.like}: it does not record options; {expected}"
        raise InputError("no-record", detail)
    declared = _declared()
    taken: dict[str, Any] = {}
    for name, value in read_options(record).items():
        one = declared[name]
        is_given = getattr(options, name) not in (one.default, ())
        is_file = isinstance(value, dict) or (name in FILES and isinstance(value, list))
        if not (is_given or is_file or name in WHERE):
            taken[name] = tuple(value) if isinstance(value, list) else value
    words: list[object] = []
    for name, value in taken.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", *([] if each is True else [each])]
    options.tell(f"as {options.like}: {shell_line(*words)}")
    return replace(options, like=None, **taken)


def as_page(value: Any, revision: str | None = None) -> Any:
    """Name a repository in a record as a person would.

    Other values stay as they are.

    revision  its commit, where something else than `value` has it
    """
    if isinstance(value, list):
        return [as_page(each, revision) for each in value]
    if not isinstance(value, dict):
        return value
    return page_of(Place(value["repo"], revision or value.get("revision"), value.get("subfolder")))


def _declared() -> dict[str, Declared]:
    return {each.name: each for each in declared_in(QuantizeOptions)}


def _given(options: QuantizeOptions) -> dict[str, Any]:
    """Return the options that a record tells of by name."""
    return options.that_make_bytes() | {"config": options.config, "format": options.format}


def _described(name: str, value: object, taken: str | None) -> object:
    """Describe an option's value in JSON, without a path."""
    if isinstance(value, tuple):
        return [_described(name, each, taken) for each in value]
    if name not in FILES or not isinstance(value, str | os.PathLike):
        return value
    if name in ("global_scale", "input_scale"):
        with suppress(ValueError):
            return float(os.fspath(value))
    if name == "recipe":
        from fp4convert.recipes.toml_files import known_names

        if os.fspath(value) in known_names():
            return value
    place, revision, subfolder = read_reference(os.fspath(value))
    if os.path.isfile(place):
        return {"sha256": hash_file(Path(place))}
    if os.path.exists(place):
        return {"taken": taken}
    if "/" not in place:
        return value
    where = {"repo": place, "revision": revision, "subfolder": subfolder, "taken": taken}
    return {key: each for key, each in where.items() if each is not None or key == "taken"}


def _is_written(declared: Declared, entry: object) -> bool:
    """Tell whether quantize writes such a value of an option; never a path."""
    if declared.name in FILES and isinstance(entry, dict):
        if not all(isinstance(each, str) for each in entry.values()):
            return False
        repo = entry.get("repo", "")
        is_hub = re.fullmatch(REPOSITORY, repo) and not os.path.exists(repo)
        is_repository = {"repo", "taken"} <= entry.keys() <= {"repo", "taken", *WHERE}
        return entry.keys() == {"sha256"} or (
            is_repository if is_hub else entry.keys() == {"taken"}
        )
    if declared.name in FILES and isinstance(entry, str):  # a recipe of ours
        return declared.option.is_recipe and entry.isidentifier()
    if declared.option.words and str(entry) not in declared.option.words:
        return False
    kinds = (str,) if declared.option.is_several else get_args(declared.type) or (declared.type,)
    return any(isinstance(entry, kind) for kind in kinds if isinstance(kind, type))


def refuse_harmed(source: Source, output: Path, settings: Settings) -> None:
    """Raise InputError where weights are not what our record says of them.

    The record of what is made would vouch for them.  Files beside the weights have to be there, and
    people may edit them.  A Hub's hashes prove what it sends; a worker that joins leaves it to
    whoever began.
    """
    is_begun = settings.is_joining and (output / PLAN_FILE).exists()
    if is_begun or source.is_streamed:
        return
    recorded = recorded_hashes(read_json(source, RECORD))
    for file in sorted(recorded.keys() - UNDIGESTED):
        if not source.has_file(file):
            raise _unsound(source, f"file-missing: {file} is recorded, and not there")
    shards = [shard for shard in source.checkpoint.shards if shard.file in recorded]
    if not shards:
        return
    files = [shard.file for shard in shards]
    settings.phases.begin("hash", sum(shard.nbytes for shard in shards))

    def read(file: str) -> str:
        with source.open_file(file) as stream:
            return hash_stream(stream, partial(settings.phases.report, file))

    with ThreadPoolExecutor(min(len(shards), processors())) as pool:
        try:
            for file, found in zip(files, pool.map(read, files), strict=True):
                if found != recorded[file]:
                    detail = f"hash-mismatch: {file} is not the file that was written"
                    raise _unsound(source, detail)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _unsound(source: Source, detail: str) -> InputError:
    found = f"{source.name}: the artifact is not sound: {detail}; expected what {RECORD} lists"
    next_step = "Download it again, or make it again: fp4convert verify names every such file."
    next_step += f" Where it was changed on purpose, take 'files' out of {RECORD}."
    return InputError("unsound-artifact", found, next_step)
