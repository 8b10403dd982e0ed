"""Make inputs of images and sound, by the model's own processor.

Only files of this disk are read.  Of what comes with a checkpoint nothing is run.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp4convert.calibration.model import import_transformers, reason_of
from fp4convert.errors import InputError, describe_missing

# Kind of a part of a message -> what of a processor reads it.
READERS = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
UNREAD = ("video", "image_url", "input_audio", "audio_url", "video_url")  # kinds of parts, too
FILE_KEYS = ("path", "url", "base64")  # where transformers looks for a file, beside the kind
COLUMNS = ("image", "images", "audio", "audios", "video", "videos")  # of data sets
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
PLACEHOLDERS = tuple(  # of config.json
    f"{kind}_token_{word}" for kind in ("image", "audio", "video") for word in ("id", "index")
)
AS_PART = 'Write it into a message: {"type": "image", "path": FILE}.'
SPOKEN = 'Give --chat FILE.jsonl with records of {"audio": FILE, "text": WORDS}.'


class Mixed(NamedTuple):
    """A record with images or sound.

    where     it stands, for errors
    kinds     of READERS
    messages  of a conversation; files have absolute paths
    tools     that the model may call, as transformers takes them
    sound     a file, without a conversation
    text      the words that are spoken in it
    """

    where: str
    kinds: tuple[str, ...]
    messages: tuple[Any, ...] = ()
    tools: Any = None
    sound: str = ""
    text: str = ""


def find_mixed(
    record: Mapping[str, Any], messages: list[Any] | None, where: str, folder: Path
) -> Mixed | None:
    """Find the images and the sound of a record; None for text alone.

    messages  of its conversation, if it is one
    folder    that its paths are relative to
    Raises    InputError for what cannot be read
    """
    columns = [key for key in COLUMNS if record.get(key)]
    text = record.get("text")
    if columns == ["audio"] and messages is None and isinstance(text, str):
        sound = _find_file(record["audio"], f"{where}: its audio", folder)
        return Mixed(where, ("audio",), sound=sound, text=text)
    if columns:
        detail = (
            f"{where} has {columns[0]!r}, which is not read there; expected a part of a message"
        )
        raise InputError("bad-dataset", detail, AS_PART)
    found: list[Any] = []
    kinds: set[str] = set()
    for message in messages or ():
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = [_read_part(part, where, folder) for part in content]
        kinds |= {part["type"] for part in parts if isinstance(part, dict)} & READERS.keys()
        found.append({**message, "content": parts})
    if not kinds:
        return None
    return Mixed(where, tuple(sorted(kinds)), tuple(found), record.get("tools") or None)


def _read_part(part: Any, where: str, folder: Path) -> Any:
    """Read a part of a message; the file that it names gets its whole path."""
    if not isinstance(part, dict):
        return part
    part = {key: value for key, value in part.items() if value is not None}  # parquet has all keys
    kind = part.setdefault("type", next((key for key in (*READERS, *UNREAD) if key in part), None))
    if kind in UNREAD:
        detail = f"{where} has a part of type {kind!r}; expected text, image or audio"
        raise InputError("bad-dataset", detail, "Leave the record out.")
    if kind not in READERS:
        return part
    keys = [key for key in (kind, *FILE_KEYS) if key in part]
    if len(keys) != 1:
        detail = f"{where} has a part of type {kind!r} with {len(keys)} files; expected one"
        raise InputError("bad-dataset", detail, f'Name it: {{"type": "{kind}", "path": FILE}}.')
    return {**part, keys[0]: _find_file(part[keys[0]], f"{where}: its {kind}", folder)}


def _find_file(name: Any, what: str, folder: Path) -> str:
    """Return the whole path of a file of this disk."""
    if not isinstance(name, str):
        detail = f"{what} is {type(name).__name__}; expected the path of a file"
        raise InputError("bad-dataset", detail, "Save it as a file, and name that.")
    if "://" in name or name.startswith("data:"):
        detail = f"{what} is the address {name[:60]!r}; expected the path of a file on this disk"
        raise InputError("bad-dataset", detail, "Download it first, and name the file.")
    path = (folder / name).absolute()
    if "\0" in name or not path.is_file():
        detail = f"{what} {name[:200]!r} is no file; expected one, relative to {folder}"
        raise InputError("bad-dataset", detail, "Correct the path, or leave the record out.")
    return str(path)


def open_processor(folder: Path, model: Any) -> Any:
    """Open the processor whose files are in a folder.

    Raises InputError where there is none, or a package that it needs is missing
    """
    transformers = import_transformers()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    name = type(model).__name__
    next_step = f"Put {PROCESSOR_FILES[1]} next to the weights, or give text alone."
    if not any((folder / file).is_file() for file in PROCESSOR_FILES[:2]):
        detail = f"the source has no {PROCESSOR_FILES[1]}, which says how images and sound are read"
        raise InputError("no-processor", detail, next_step)
    try:
        kind: Any = getattr(transformers, _stored_class(folder), None)
        kind = kind or PROCESSOR_MAPPING.get(type(model.config), None)
        if kind is None:
            raise ValueError(f"transformers knows none for {name}")
        if issubclass(kind, transformers.ProcessorMixin):
            kind = _without_videos(kind)
        elif "_backends" not in vars(kind):  # else it says which package is missing
            raise ValueError(f"{kind.__name__} of transformers is none")
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ImportError as error:
        raise _describe_package(error, "the processor of this model") from None
    except InputError:
        raise
    except Exception as error:  # of many kinds: each part of a processor checks itself
        why = reason_of(ValueError(str(error).replace(str(folder), "the source")))
        detail = f"the source has no processor that transformers can use: {why}"
        raise InputError("no-processor", detail, next_step) from None


def _stored_class(folder: Path) -> str:
    """Return the name of the processor's class that files of a folder say."""
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            stored = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(stored, dict) and stored.get("processor_class"):
                return str(stored["processor_class"])
    return ""


def _without_videos(kind: Any) -> Any:
    """Leave the part for videos out where its package is missing.

    That part is given no videos here; without torchvision it cannot be made.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available() or "video_processor" not in kind.get_attributes():
        return kind
    place = inspect.signature(kind.__init__).parameters.get("video_processor")
    if place is None or place.default is inspect.Parameter.empty:
        raise ImportError(f"{kind.__name__} requires the torchvision library")
    rest = [name for name in kind.get_attributes() if name != "video_processor"]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda own: rest)})


def _describe_package(error: ImportError, what: str) -> InputError:
    """Say which package is to be installed."""
    found = re.search(r"requires (?:the )?([\w.-]+)", str(error))
    name = (found[1] if found else str(error.name)).lower()
    if name in ("pil", "pillow"):
        needing = f"{what} needs the package pillow"
        return InputError("no-processor-package", *describe_missing(needing, "calibrate"))
    name = "soundfile soxr" if name in ("soundfile", "soxr") else name
    detail = f"{what} needs {name}, which is not installed"
    return InputError("no-processor-package", detail, f"Install it: pip install {name}")


def read_mixed(record: Mixed, processor: Any, model: Any) -> dict[str, torch.Tensor]:
    """Make the inputs of the model that a record stands for: a batch of one.

    Returns  input_ids, of a model that listens those that it is to write; and others by name
    Raises   InputError where the processor or the model does not take it
    """
    name = type(model).__name__
    if record.sound and not listens(model):
        detail = f"{record.where} has 'audio' beside 'text', which is for models that write down"
        detail += f" what they hear; {name} takes messages"
        raise InputError("bad-dataset", detail, AS_PART.replace("image", "audio"))
    for kind in record.kinds:
        if not any(getattr(processor, part, None) is not None for part in READERS[kind]):
            detail = f"{record.where} has {kind}, and {type(processor).__name__} reads none"
            raise InputError("no-processor", detail, "Leave the record out.")
        needed = ("PIL",) if kind == "image" else ("soundfile", "soxr")
        if any(find_spec(package) is None for package in needed):
            missing = ImportError(f"requires {needed[0]}")
            raise _describe_package(missing, f"reading {kind}")
    try:
        made = _speech(record, processor, model) if record.sound else _chat(record, processor)
    except ImportError as error:
        raise _describe_package(error, f"reading {' and '.join(record.kinds)}") from None
    except InputError:
        raise
    except Exception as error:  # templates and readers of files raise what they like
        detail = f"{record.where} cannot be read by the source's processor: {reason_of(error)}"
        raise InputError("bad-dataset", detail, "Correct it, or leave the record out.") from None
    taken = inspect.signature(model.forward).parameters
    tensors = {key: each for key, each in made.items() if isinstance(each, torch.Tensor)}
    media = [key for key, each in tensors.items() if each.is_floating_point() and key in taken]
    if len(tensors) < len(made) or not media:
        detail = f"{record.where}: {name} takes no {' or '.join(record.kinds)} as"
        detail += f" {type(processor).__name__} makes of it: {sorted(made)}"
        raise InputError("no-processor", detail, "Leave the record out.")
    return tensors


def _chat(record: Mixed, processor: Any) -> dict[str, Any]:
    """Let the processor write a conversation, and read its files."""
    template = processor.chat_template or processor.tokenizer.chat_template
    if not template:
        detail = f"{record.where} is a conversation, and the source has no chat template"
        next_step = "Put chat_template.jinja next to the weights."
        raise InputError("bad-dataset", detail, next_step)
    made = processor.apply_chat_template(
        list(record.messages),
        chat_template=template,
        tools=record.tools,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return dict(made)


def _speech(record: Mixed, processor: Any, model: Any) -> dict[str, Any]:
    """Make features of a sound, and the tokens that are to be written."""
    from transformers.audio_utils import load_audio

    reader = processor.feature_extractor
    sound = load_audio(record.sound, sampling_rate=reader.sampling_rate)
    made = dict(reader(sound, sampling_rate=reader.sampling_rate, return_tensors="pt"))
    ids = list(processor.tokenizer(record.text)["input_ids"])
    # The model is given its first token beside them.
    if ids[:1] == [model.config.decoder_start_token_id]:
        ids = ids[1:]
    return {**made, "input_ids": torch.tensor([ids])}


def placeholders_of(model: Any) -> list[int]:
    """List the tokens in whose places a model puts images and sound."""
    found = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return [token for token in found if isinstance(token, int)]


def listens(model: Any) -> bool:
    """Tell whether a model reads sound alone, and writes text."""
    name = getattr(model, "main_input_name", "input_ids")
    is_heard = name in ("input_features", "input_values")
    return bool(is_heard and model.config.is_encoder_decoder and model.can_generate())
