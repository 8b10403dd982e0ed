"""Read JSON strictly, and write it indented.

Strictly: UTF-8, no duplicate keys, no unexpected NaN, no deeper nesting than Python's recursion.
"""

from __future__ import annotations

import errno
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from fp4convert.errors import InputError
from fp4convert.storage.disk import open_regular

FLOAT_DIGITS = 300  # an integer of fewer digits fits a float64
TEXT_LIMIT = 1 << 28  # bytes of a file of text: the index of a million tensors takes half of it
# Errors of reading a document of an unexpected shape, also of huge numbers.
MISSHAPEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_text_file(path: Path) -> str:
    """Read a file of UTF-8 text.

    Raises  OSError, also for a huge file; ValueError for other text
    """
    with open_regular(path, -1) as stream:
        text = stream.read(TEXT_LIMIT + 1)
    if len(text) > TEXT_LIMIT:
        raise OSError(errno.EFBIG, f"it is longer than {TEXT_LIMIT:,} bytes", str(path))
    return text.decode("utf-8")


def parse_json_object(text: bytes, where: str, has_constants: bool = False) -> dict[str, object]:
    """Parse a JSON object, strictly; numbers must fit a float.

    where          names the text in messages, such as "model.safetensors: header"
    has_constants  accept NaN and Infinity, as in configs of models
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


QUANTIZATION_KEYS = frozenset(  # of config.json, in any dialect
    {"quantization_config", "compression_config", "quantization", "expert_dtype"}
    | {"ple_embedding_dtype"}
)


def unquantized(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config, and those of its parts, without keys of quantization."""
    try:
        return {
            key: unquantized(value) if isinstance(value, dict) else value
            for key, value in config.items()
            if key not in QUANTIZATION_KEYS
        }
    except RecursionError:
        raise InputError("header", "config.json is nested too deep; expected a config") from None


_NESTED = (dict, list, tuple)
_NUMBERS = {int, float, type(None)}
_ROWS = 1000  # entries of a list or an object in one call


def as_text(value: object) -> str:
    """Return json.dumps with an indent of 2 and without ASCII escapes."""
    return "".join([*pieces_of(value, is_ascii=False), "\n"])


def pieces_of(
    value: object, is_ascii: bool = True, lead: str = "\n", is_short: bool = False
) -> Iterator[str]:
    """Yield json.dumps' text with an indent of 2, in a tenth of the time.

    One call spells many plain values, or many objects of plain values in a list.
    tests/storage/test_json_text.py compares both texts.

    lead      begin of a line
    is_short  a list of numbers in an object stands in one line
    """
    spell = partial(json.dumps, ensure_ascii=is_ascii)
    if not isinstance(value, _NESTED) or not value:
        yield spell(value)
        return
    inner, (opening, closing) = f"{lead}  ", "{}" if isinstance(value, dict) else "[]"
    before, deeper = f"{opening}{inner}", f"{inner}  "
    # No string of JSON holds a line end: this stands only between two rows.
    between, indented = f"}},{deeper}{{", f"{inner}}},{inner}{{{deeper}"
    children: Any = value.values() if isinstance(value, dict) else value
    if not _has_nested(children):
        entries = iter(value.items() if isinstance(value, dict) else value)
        kind: Any = dict if isinstance(value, dict) else list
        while some := kind(islice(entries, _ROWS)):
            yield f"{before}{spell(some, separators=(f',{inner}', ': '))[1:-1]}"
            before = f",{inner}"
    elif isinstance(value, dict):
        for key, child in value.items():
            yield f"{before}{spell({key: 0})[1:-2]}"
            if is_short and isinstance(child, list) and {*map(type, child)} <= _NUMBERS:
                yield spell(child)
            else:
                yield from pieces_of(child, is_ascii, inner, is_short)
            before = f",{inner}"
    elif _are_rows(children):
        for at in range(0, len(children), _ROWS):
            text = spell(children[at : at + _ROWS], separators=(f",{deeper}", ": "))
            yield f"{before}{{{deeper}{text[2:-2].replace(between, indented)}{inner}}}"
            before = f",{inner}"
    else:
        for child in children:
            yield before
            yield from pieces_of(child, is_ascii, inner, is_short)
            before = f",{inner}"
    yield f"{lead}{closing}"


def _has_nested(values: Iterable[object]) -> bool:
    return any(issubclass(kind, _NESTED) for kind in set(map(type, values)))


def _are_rows(children: Sequence[Any]) -> bool:
    """Return whether all are objects of plain values, and none is empty."""
    is_row = all(children) and {*map(type, children)} == {dict}
    return is_row and not _has_nested(chain.from_iterable(map(dict.values, children)))
