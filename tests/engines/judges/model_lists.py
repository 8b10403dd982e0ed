"""List the models that engines have a class for, as their packages say: configs/engines/models.

    python tests/engines/judges/model_lists.py FOLDER...

Folders hold packages, as site-packages does; nothing of them is imported. What is in none of them
is left as it is. The test is tests/engines/test_model_lists.py.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LISTS = Path(__file__).resolve().parents[3] / "configs" / "engines" / "models"


class Package(NamedTuple):
    """Where an engine says what it has classes for.

    by     what its names are: "class" or "model_type"
    names  reads them from the folder of the package
    """

    folder: str
    file: str
    by: str
    names: Callable[[Path], set[str]]


def _assigned(file: Path) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns at its top, and the values."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if isinstance(node, ast.AnnAssign) and node.value:
            targets, value = (node.target,), node.value
        elif isinstance(node, ast.Assign):
            value = node.value
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value


def _keys(value: ast.expr) -> Iterator[str]:
    """Yield the keys that a display of a dict, or of pairs, has."""
    if isinstance(value, ast.Call):
        for part in value.args:
            yield from _keys(part)
    elif isinstance(value, ast.Dict):
        yield from (key.value for key in value.keys if isinstance(key, ast.Constant))
    elif isinstance(value, ast.List):
        for pair in value.elts:
            if isinstance(pair, ast.Tuple) and isinstance(pair.elts[0], ast.Constant):
                yield str(pair.elts[0].value)


def of_vllm(folder: Path) -> set[str]:
    """Return the classes of vLLM's registry."""
    tables = dict(_assigned(folder / "model_executor/models/registry.py"))
    every = tables["_VLLM_MODELS"]
    assert isinstance(every, ast.Dict)
    parts = [part.id for part in every.values if isinstance(part, ast.Name)]
    return {key for part in parts for key in _keys(tables[part])}


def endings_of_vllm(folder: Path) -> list[str]:
    """Return the endings of names of classes that vLLM takes for one another."""
    return list(_keys(dict(_assigned(folder / "config/model.py"))["_SUFFIX_TO_DEFAULTS"]))


def of_sglang(folder: Path) -> set[str]:
    """Return the entry classes of SGLang's models."""
    found: set[str] = set()
    for file in (folder / "srt/models").rglob("*.py"):
        for name, value in _assigned(file):
            if name == "EntryClass":
                entries = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                found |= {entry.id for entry in entries if isinstance(entry, ast.Name)}
    return found


def of_transformers(folder: Path) -> set[str]:
    """Return the model types of transformers' AutoModel."""
    tables = dict(_assigned(folder / "models/auto/modeling_auto.py"))
    tasks = ("MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return {key for task in tasks for key in _keys(tables[task])}


def of_mlx_lm(folder: Path) -> set[str]:
    """Return the model types that mlx-lm has a module for, and their other names."""
    modules = {
        file.stem
        for file in (folder / "models").glob("*.py")
        if "class ModelArgs" in file.read_text(encoding="utf-8")
    }
    return modules | set(_keys(dict(_assigned(folder / "utils.py"))["MODEL_REMAPPING"]))


def of_diffusers(folder: Path) -> set[str]:
    """Return the classes that Diffusers' from_single_file takes."""
    tables = dict(_assigned(folder / "loaders/single_file_model.py"))
    return set(_keys(tables["SINGLE_FILE_LOADABLE_CLASSES"]))


def of_llama_cpp(folder: Path) -> set[str]:
    """Return llama.cpp's architectures: its library's table, and that of its package gguf.

    The library lists them one behind another, from before minimax-m2 to "(unknown)"; names that
    stand elsewhere in it, too, are there alone, and are in gguf.
    """
    (library,) = folder.glob("*.so")
    before, _, behind = library.read_bytes().partition(b"\0minimax-m2\0")
    found = {"minimax-m2"}
    for words in (reversed(before.split(b"\0")[-500:]), behind.split(b"\0")[:500]):
        for word in filter(None, words):
            if not re.fullmatch(rb"[a-z0-9_.-]+", word):
                break
            found.add(word.decode())
    numbers = dict(_assigned(folder.parent / "gguf/constants.py"))["MODEL_ARCH_NAMES"]
    assert isinstance(numbers, ast.Dict)
    known = {str(one.value) for one in numbers.values if isinstance(one, ast.Constant)}
    return known | {name for name in found if "token_embd" not in name}


PACKAGES = {
    "llama.cpp": Package("xllamacpp", "its table of architectures", "model_type", of_llama_cpp),
    "vllm": Package("vllm", "model_executor/models/registry.py", "class", of_vllm),
    "sglang": Package("sglang", "srt/models, EntryClass", "class", of_sglang),
    "transformers": Package(
        "transformers", "models/auto/modeling_auto.py", "model_type", of_transformers
    ),
    "mlx": Package("mlx_lm", "models", "model_type", of_mlx_lm),
    "diffusers": Package("diffusers", "loaders/single_file_model.py", "class", of_diffusers),
}


def written(engine: str) -> dict[str, Any]:
    """Return what the list of an engine says."""
    table = tomllib.loads((LISTS / f"{engine}.toml").read_text(encoding="utf-8"))
    return {**table, "names": table["names"].split()}


def version_in(root: Path, package: str) -> str:
    """Return the version of a package, by its dist-info; "" where it is not there."""
    found = sorted(root.glob(f"{package}-*.dist-info"))
    has_code = (root / package / "__init__.py").exists()
    return found[-1].stem.removeprefix(f"{package}-") if found and has_code else ""


def text_of(engine: str, root: Path) -> str:
    """Return the list of an engine as its package in a folder says it."""
    package = PACKAGES[engine]
    names = sorted(package.names(root / package.folder))
    endings = endings_of_vllm(root / package.folder) if engine == "vllm" else []
    lines = [
        "# Made by tests/engines/judges/model_lists.py; do not edit.",
        f'source = "{package.folder} {version_in(root, package.folder)}, {package.file}"',
        f'by = "{package.by}"',
        *([f"endings = {json.dumps(endings)}"] if endings else []),
        "names = '''",  # one text, which is read in a tenth of the time of a list
        *names,
        "'''",
    ]
    return "\n".join(lines) + "\n"


def main(roots: list[str]) -> None:
    """Write the lists of all engines whose packages are there."""
    for root in map(Path, roots):
        for engine, package in PACKAGES.items():
            if version_in(root, package.folder):
                (LISTS / f"{engine}.toml").write_text(text_of(engine, root), encoding="utf-8")
                print(f"{engine}: {len(written(engine)['names'])} of {written(engine)['source']}")


if __name__ == "__main__":
    main(sys.argv[1:])
