"""Read JSON strictly, and write it indented.

Strictly: UTF-8, no name twice in one object, no NaN where none is expected, no nesting without end.
"""

from __future__ import annotations

import errno
import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fp4convert.errors import InputError

FLOAT_DIGITS = 300  # an integer of fewer digits fits a float64
TEXT_LIMIT = 1 << 28  # bytes of a file of text: the index of a million tensors takes half of it
DEPTH_LIMIT = 125  # of a value inside an entry; the reference reader allows 127 in all


def read_text_file(path: Path) -> str:
    """Read a file of UTF-8 text.

    Raises  OSError, also where it is too long for one; ValueError where it is not UTF-8
    """
    with path.open("rb") as stream:
        text = stream.read(TEXT_LIMIT + 1)
    if len(text) > TEXT_LIMIT:
        raise OSError(errno.EFBIG, f"it is longer than {TEXT_LIMIT:,} bytes", str(path))
    return text.decode("utf-8")


def parse_json_object(text: bytes, where: str, has_constants: bool = False) -> dict[str, object]:
    """Read a JSON object, strictly.

    UTF-8, no duplicate keys, numbers that fit a float.

    where          how messages name the text, such as "model.safetensors: header"
    has_constants  accept NaN and Infinity, which JSON lacks and model configs hold
    Raises         InputError
    """
    expected = "expected one JSON object"
    try:
        decoded = text.decode("utf-8")
        numbers: dict[str, Any] = {
            "parse_constant": float if has_constants else refuse_constant,
            "parse_int": _integer,
            "parse_float": _finite,
        }
        parsed = json.loads(decoded, object_pairs_hook=partial(_unique, where), **numbers)
        if "\\u" in decoded:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "header-utf8", f"{where} is not UTF-8 at byte {error.start}; {expected}"
        ) from None
    except UnicodeEncodeError:
        raise InputError(
            "header-utf8", f"{where} holds a lone surrogate, which is not UTF-8; {expected}"
        ) from None
    except (ValueError, RecursionError) as error:
        detail = "nesting too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(
            "header", f"{where} is not valid JSON ({detail[:100]}); {expected}"
        ) from None
    if not isinstance(parsed, dict):
        raise InputError("header", f"{where} is not a JSON object; {expected}")
    return parsed


def _unique(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    built = dict(pairs)
    if len(built) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        detail = f"{where} holds the duplicate key {twice!r}; expected each once"
        raise InputError("duplicate-key", detail)
    return built


def refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int | float:
    if len(digits) > FLOAT_DIGITS:
        _finite(digits)
    return -0.0 if digits == "-0" else int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else float(refuse_constant(digits))


def depth_of(value: object) -> int:
    """Count the lists and objects that stand inside one another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth_of, inner), default=0) if isinstance(value, dict | list) else 0


QUANTIZATION_KEYS = frozenset(  # of config.json, in any dialect
    {"quantization_config", "compression_config", "quantization", "expert_dtype"}
)


def unquantized(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config without a word on quantization.

    Nor in the configs of its parts.
    """
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    return {
        key: unquantized(value) if isinstance(value, dict) else value for key, value in kept.items()
    }


_NESTED = (dict, list, tuple)  # what JSON nests


def as_text(value: object) -> str:
    """Write the JSON of a small file, whichever stage writes it.

    What json.dumps makes with an indent of 2, in a tenth of the time; they are held together by
    tests/storage/test_json_text.py.
    """
    return f"{_indented(value)}\n"


def _indented(value: object, lead: str = "\n") -> str:
    """Write the JSON of a value in a line that begins so.

    A list or an object of plain values is spelled at once.  Keys are strings.
    """
    inner = f"{lead}  "
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, _NESTED) else ()
    )
    if not any(issubclass(kind, _NESTED) for kind in set(map(type, children))):
        text = json.dumps(value, ensure_ascii=False, separators=(f",{inner}", ": "))
        return f"{opening}{inner}{text[1:-1]}{lead}{closing}" if children else text
    texts = [_indented(child, inner) for child in children]
    if isinstance(value, dict):
        texts = [
            f"{json.dumps(key, ensure_ascii=False)}: {text}"
            for key, text in zip(value, texts, strict=True)
        ]
    return f"{opening}{inner}{f',{inner}'.join(texts)}{lead}{closing}"
