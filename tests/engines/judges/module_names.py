"""List what transformers calls modules of checkpoints: configs/engines/names/transformers.toml.

    PYTHONPATH=tests/support python tests/engines/judges/module_names.py

Models are built from transformers' own configs, without values. Each linear layer has the name that
the model gives it and the one that transformers saves it under. The test is
tests/engines/test_module_names.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp4convert.engines.module_names import NameTable

NAMES = Path(__file__).resolve().parents[3] / "configs" / "engines" / "names"
Pairs = Mapping[str, tuple[str, ...]]
"""A module of the checkpoint, and those of the model that its matrix becomes."""


def saved_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Return the linear layers of a model by the names that transformers saves them under."""
    from torch.nn import Linear
    from transformers.core_model_loading import revert_weight_conversion

    linears = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module not in linears or module == name:
            continue
        for saved in revert_weight_conversion(model, {name: tensor}):
            if saved.endswith(".weight"):
                found[saved.removesuffix(".weight")].append(module)
    return {saved: tuple(modules) for saved, modules in found.items()}


def lines_of(pairs: Pairs) -> list[str]:
    """Write the names that differ, as few letters as tell them all."""
    differing = {saved: modules for saved, modules in pairs.items() if modules != (saved,)}
    short = {_shortened(saved, modules) for saved, modules in differing.items()}
    tables = {line: NameTable.parse([line]) for line in short}
    whole = {_numberless(saved, modules) for saved, modules in differing.items()}
    right = {
        line
        for line, table in tables.items()
        if all(table.names(saved) in (names, (saved,)) for saved, names in pairs.items())
    }
    return min((_completed(lines, pairs) for lines in (short, whole | right)), key=_letters)


def _letters(lines: list[str]) -> int:
    return len("\n".join(lines))


def _completed(lines: set[str], pairs: Pairs) -> list[str]:
    """Give a line of its own to what lines get wrong, and leave out what is idle."""
    made = set(lines)
    for _ in range(2):
        table = NameTable.parse(_sorted(made))
        wrong = {saved: names for saved, names in pairs.items() if table.names(saved) != names}
        made |= {_numberless(saved, names) for saved, names in wrong.items()}
    kept = _sorted(made)
    true = {saved for saved, names in pairs.items() if NameTable.parse(kept).names(saved) == names}
    for line in list(kept):  # the longer names first: a shorter one may say the same
        fewer = [each for each in kept if each != line]
        table = NameTable.parse(fewer)
        if all(table.names(saved) == pairs[saved] for saved in true):
            kept = fewer
    return kept


def _sorted(lines: Iterable[str]) -> list[str]:
    """Put the longer names first, for the first that fits counts."""
    return sorted(lines, key=lambda line: (-line.split(" > ")[0].count("."), line))


def _shortened(saved: str, modules: tuple[str, ...]) -> str:
    """Leave out the end that both names have."""
    if len(modules) > 1:
        return _numberless(saved, modules)
    left, right = saved.split("."), modules[0].split(".")
    while len(left) > 1 and len(right) > 1 and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return _numberless(".".join(left), (".".join(right),))


def _numberless(saved: str, modules: tuple[str, ...]) -> str:
    """Write # for the numbers that all names have at their beginning."""
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in (saved, *modules)]
    shared = 0
    while all(len(each) > shared and each[shared] == numbers[0][shared] for each in numbers):
        shared += 1
    names = [
        re.sub(r"(?<![^.])\d+(?![^.])", "#", name, count=shared) if shared else name
        for name in (saved, *modules)
    ]
    return f"{names[0]} > {' '.join(names[1:])}"


def text_of(lines: Mapping[str, list[str]], version: str) -> str:
    """Write the table of all model types; those with the same lines stand together."""
    written = [
        "# Made by tests/engines/judges/module_names.py; do not edit.",
        "# NAME > NAMES: what the checkpoint calls modules, or what their names begin with, and",
        "# what the engine calls them; # stands for a number. The first line that fits counts.",
        f'source = "transformers {version}, conversion_mapping.py"',
        "",
        "[names]",
    ]
    alike: dict[str, list[str]] = defaultdict(list)
    for model_type, each in sorted(lines.items()):
        alike["\n".join(each)].append(model_type)
    for text, model_types in alike.items():
        written += [f"\"{' '.join(model_types)}\" = '''", text, "'''"]
    return "\n".join(written) + "\n"


def main() -> None:
    """Write the table of every model type that transformers builds."""
    import transformers
    from meta_models import model_of

    lines = {}
    for model_type in transformers.CONFIG_MAPPING:
        try:
            model = model_of(model_type)
            pairs = saved_names(model)
        except Exception as error:  # of many kinds: configs that make no model
            print(f"{model_type}: {type(error).__name__}")
            continue
        if made := lines_of(pairs):
            lines[model_type] = made
    NAMES.mkdir(exist_ok=True)
    text = text_of(lines, transformers.__version__)
    (NAMES / "transformers.toml").write_text(text, encoding="utf-8")
    print(f"{len(lines)} model types")


if __name__ == "__main__":
    main()
