"""Change an input: trees where it is JSON, words and bytes elsewhere."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], {"": ""}, "", "0", "*", "\0", "\n", "\ud800", "ä"),
    *(0, -1, 1, 2, 3, 16, 64, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 64, 10**25, 10**400),
    *(0.5, -0.0, 1e-45, 1e308, -1e308, "NaN", "1e999", "../x", "/x", "a/b", ".", "x" * 5000),
    *("re:(a|a)+$", "re:((a+)b?)+$", "re:(?:(?:.?){30}){30}y", "re:(", "[", "{a:b}", "{0:99999}"),
    *("nvfp4", "mxfp4", "fp8", "U8", "F8_E4M3", "F8_E8M0", "F32", "BF16", "I64", "linear", "128x4"),
)
WORDS = (
    *(str(word).encode("utf-8", "surrogatepass") for word in ODD),
    *(b"NaN", b"Infinity", b"-1e999", b"null", b"\\ud800", b"\xff\xfe", b"\xef\xbb\xbf"),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 300, b"9" * 5000, b"[[", b"]]", b'"""', bytes(8)),
)
WORD = re.compile(rb"[A-Za-z0-9_.*{}:-]+")


def mutate(data: bytes, chance: random.Random, most: int = 1 << 16) -> bytes:
    """Return a changed input.

    most  its length in bytes, at most
    """
    for _ in range(1 + int(chance.expovariate(1.0))):
        data = _change(data, chance)
    return data[:most]


def _change(data: bytes, chance: random.Random) -> bytes:
    # A header of safetensors is JSON behind its length, which mostly stays true.
    length = int.from_bytes(data[:8], "little")
    if data[8:9] == b"{" and length <= len(data) - 8 and chance.random() < 0.9:
        text = _change(data[8 : 8 + length], chance)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    if data[:1] == b"{" and chance.random() < 0.9:
        try:
            return _change_tree(data, chance)
        except (ValueError, RecursionError):
            pass
    return _change_bytes(data, chance)


def _change_tree(text: bytes, chance: random.Random) -> bytes:
    """Change a value of a JSON document, or a text of several lines in it."""
    root = {"": json.loads(text)}
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    holder, key = chance.choice(places)
    value, (other, others_key) = holder[key], chance.choice(places)
    match chance.randrange(7):
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder, dict) and holder is not root:
            # Under another name, or under one more.
            name = chance.choice([*map(str, ODD[:24]), str(others_key), f"{key}x", f"x.{key}"])
            holder[name] = copy.deepcopy(value)
            if chance.random() < 0.5:
                holder.pop(key, None)
        case 1 if isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(value)] * chance.choice((1, 1, 2, 100))
        case 2 | 3:
            holder[key] = copy.deepcopy(other[others_key])
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = chance.choice((value + 1, value - 1, -value, value * 2, value // 2))
        case 4 | 5 if isinstance(value, str) and value:
            changed = _change_bytes(value.encode("utf-8", "surrogatepass"), chance)
            holder[key] = changed.decode("utf-8", "replace")
        case _:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return json.dumps(root[""], allow_nan=True).encode()


def _change_bytes(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + int(chance.expovariate(0.1)))
    found = [one.span() for one in WORD.finditer(data)]
    match chance.randrange(6):
        case 0 if found:  # a word by another of the text
            (begin, end), (first, last) = chance.choice(found), chance.choice(found)
            return data[:begin] + data[first:last] + data[end:]
        case 1 if found:  # a word by an odd one
            begin, end = chance.choice(found)
            return data[:begin] + chance.choice(WORDS) + data[end:]
        case 2:
            return data[:begin] + data[end:]
        case 3:
            return data[:end] + data[begin:end] * chance.choice((1, 1, 2, 100)) + data[end:]
        case 4 if end > begin:
            flipped = data[begin] ^ 1 << chance.randrange(8)
            return data[:begin] + bytes([flipped]) + data[begin + 1 :]
        case _:  # a number of eight bytes, as binary headers have them
            number = chance.choice((0, 1, 2, 8, 9, 32, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 63))
            number = (number + chance.choice((-1, 0, 0, 1))) % (1 << 64)
            return data[:begin] + number.to_bytes(8, "little") + data[begin + 8 :]
