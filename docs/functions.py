"""Make fp4convert/commands/functions.py of the declared options: `make docs`.

python docs/functions.py            # exits 1 where the file differs
python docs/functions.py --write    # replaces it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import Parameter, getdoc, signature
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
from tables import write_stale  # noqa: E402

import fp4convert  # noqa: E402
from fp4convert.cli.commands import COMMANDS  # noqa: E402
from fp4convert.recipes.options import declared_in, help_with_words  # noqa: E402

FILE = ROOT / "fp4convert" / "commands" / "functions.py"
HEAD = '''"""Call commands from Python: words by name, results as values.

Made by `make docs` of the options that options/ declares: change those, not this file.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fp4convert.commands.checks import by_name, checked
from fp4convert.options.access import ignore
'''
COLUMNS = 96  # of a docstring's line, without its indent


def text() -> str:
    """Return the file, as ruff would format it."""
    kinds = dict(_works())
    homes = {kind.__name__: kind.__module__.removeprefix("fp4convert.") for kind in kinds.values()}
    homes |= {"Phases": "progress", "Globs": "recipes.options", "Reference": "recipes.options"}
    returned = {_returned(work) for work in kinds} & fp4convert._HOME.keys()
    later = {name: fp4convert._HOME[name] for name in returned}
    lines = [*_imports(homes, ""), "", "if TYPE_CHECKING:", *_imports(later, "    ")]
    documented: dict[type, str] = {}
    for work, kind in kinds.items():
        lines += ["", "", *_function(work, kind, documented)]
    return HEAD + "\n".join(lines) + "\n"


def _works() -> Iterator[tuple[Callable[..., Any], type]]:
    """Return the work of every command that Python has, and the class of its options."""
    for name, command in COMMANDS.items():
        if name in fp4convert.__all__:
            for place in filter(None, (command.work, command.preview)):
                module, _, work = place.partition(":")
                yield getattr(import_module(f"fp4convert.{module}"), work), command.options


def _returned(work: Callable[..., Any]) -> str:
    return str(work.__annotations__["return"])


def _imports(homes: dict[str, str], indent: str) -> Iterator[str]:
    """Import names from their modules: home -> one line, or one name a line."""
    for home in sorted(set(homes.values())):
        names = sorted(name for name, own in homes.items() if own == home)
        line = f"{indent}from fp4convert.{home} import {', '.join(names)}"
        if len(line) <= COLUMNS + len("    "):
            yield line
        else:
            yield f"{indent}from fp4convert.{home} import ("
            yield from (f"{indent}    {name}," for name in names)
            yield f"{indent})"


def _function(work: Callable[..., Any], kind: type, documented: dict[type, str]) -> Iterator[str]:
    """Write one function, with its options unless another has shown them."""
    name, module = work.__name__, work.__module__.rpartition(".")[2]
    yield from ("@by_name", f"def {name}(")
    is_named = False
    for each in signature(kind).parameters.values():
        if each.kind is Parameter.KEYWORD_ONLY and not is_named:
            is_named = True
            yield "    *,"
        yield f"    {each.name}: {_spelled(each.annotation)}{_default(each.default)},"
    returned = _returned(work)
    yield f') -> "{returned}":' if returned in fp4convert._HOME else f") -> {returned}:"
    first, *others = (getdoc(work) or "").splitlines()
    if kind in documented:
        others += ["", f"The options are those of `{documented[kind]}`."]
    else:
        documented[kind] = name
        others.append("")
        for each in declared_in(kind):
            row = f"{each.name}: {help_with_words(each.option)}"
            others += wrap(
                row,
                COLUMNS,
                subsequent_indent="    ",
                break_on_hyphens=False,
                break_long_words=False,
            )
    yield f'    """{first}'
    yield from (f"    {line}".rstrip() for line in others)
    yield '    """'
    yield f"    options = checked({kind.__name__}(**locals()))"
    yield f"    from fp4convert.commands import {module}"
    yield ""
    yield f"    return {module}.{name}(options)"


def _spelled(annotation: Any) -> str:
    """Spell a type as this package's modules do."""
    hint = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    spelled = hint.__name__ if isinstance(hint, type) else str(hint)
    spelled = spelled.replace("str | os.PathLike[str]", "Reference")
    spelled = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", spelled)  # modules
    return "Globs" if spelled == "str | Iterable[str] | None" else spelled


def _default(value: object) -> str:
    if value is Parameter.empty:
        return ""
    if isinstance(value, str):
        return f" = {json.dumps(value)}"
    return f" = {value.__name__ if callable(value) else repr(value)}"


def main(arguments: list[str]) -> int:
    """Make the functions again."""
    return write_stale({FILE: text()}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
