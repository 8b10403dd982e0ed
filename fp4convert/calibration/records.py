"""Read texts and conversations: plain text, jsonl, parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fp4convert.calibration.model import reason_of
from fp4convert.calibration.multimodal import Mixed, find_mixed
from fp4convert.errors import InputError

CHATS = ("messages", "conversations")  # keys of records that hold a conversation
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's words, and chat templates'


def read_texts(files: Iterable[Path], is_by_line: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Read files of text, with the options of the tokenizer."""
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            detail = f"{path} cannot be read as UTF-8 text: {error}"
            step = "Give plain text in UTF-8; iconv -f LATIN1 -t UTF-8 FILE > TEXT converts one."
            raise InputError("bad-text", detail, step) from None
        for part in text.splitlines() if is_by_line else [text]:
            if part.strip():
                yield part, {}


def read_records(path: Path, tokenizer: Any) -> Iterator[tuple[str, dict[str, object]] | Mixed]:
    """Read the texts of records, with the options of the tokenizer.

    Records with images or sound are read as they are.
    """
    is_parquet = path.suffix == ".parquet"
    records = _read_parquet(path) if is_parquet else _read_jsonl(path)
    for number, record in enumerate(records, 1):
        where = f"{path}: record {number}"
        options: dict[str, object] = {}
        chat = next((record[key] for key in CHATS if isinstance(record.get(key), list)), None)
        messages = None if chat is None else [_as_message(each) for each in chat]
        if mixed := find_mixed(record, messages, where, path.absolute().parent):
            yield mixed
            continue
        if messages is not None:
            options = {"add_special_tokens": False}  # the template has written them
            text = _write_chat(messages, record.get("tools"), tokenizer, where)
        elif isinstance(record.get("text"), str):
            text = record["text"]
        else:
            detail = f"{where} has neither a 'text' that is a string nor a list of 'messages'"
            detail += f", but {sorted(map(str, record))[:5]}"
            raise InputError("bad-dataset", detail, "Give every record one of them.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can hold it, and no tokenizer takes it
            detail = f"{where} holds half a surrogate pair at character {error.start}"
            detail += "; expected Unicode text"
            raise InputError("bad-dataset", detail, "Leave the record out.") from None
        yield text, options


def _as_message(each: Any) -> Any:
    """Write a message as templates have it; ShareGPT's has from and value."""
    if isinstance(each, dict) and each.keys() >= {"from", "value"}:
        return {"role": SPEAKERS.get(each["from"], each["from"]), "content": each["value"]}
    return each


def _write_chat(messages: list[Any], tools: object, tokenizer: Any, where: str) -> str:
    """Write a conversation as the model's own template does.

    tools  that the model may call, in the form of transformers; None without
    """
    if not tokenizer.chat_template:
        detail = f"{where} is a conversation, and the source has no chat template"
        next_step = "Put chat_template.jinja next to the weights, or give records with 'text'."
        raise InputError("bad-dataset", detail, next_step)
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
    except Exception as error:  # templates raise what they like
        detail = f"{where} does not fit the source's chat template: {reason_of(error)}"
        raise InputError("bad-dataset", detail, "Correct it, or leave the record out.") from None


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a jsonl file, one object a line."""
    with path.open(encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream, 1):
                try:
                    record = json.loads(line) if line.strip() else None
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                if record is not None and not isinstance(record, dict):
                    raise ValueError(f"line {number} is not an object")
                if record is not None:
                    yield record
        except (ValueError, RecursionError) as error:
            detail = f"{path} is not jsonl, one JSON object on each line: {error}"
            raise InputError("bad-dataset", detail, "Give jsonl or parquet.") from None


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            ArrowException,
            parquet,
        )
    except ImportError:
        detail = f"{path}: reading parquet needs the package pyarrow; it is not installed"
        next_step = "Install it: pip install pyarrow. Or give jsonl."
        raise InputError("no-pyarrow", detail, next_step) from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        detail = f"{path} is not a parquet file: {error}"
        raise InputError("bad-dataset", detail, "Give jsonl or parquet.") from None
