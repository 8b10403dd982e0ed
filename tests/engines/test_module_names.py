"""The tables of names that engines give modules are what their packages say."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping

import pytest
from meta_models import model_of
from paths import ROOT

from fp4convert.engines.module_names import NameTable

sys.path.insert(0, str(ROOT / "tests" / "engines" / "judges"))
from module_names import NAMES, lines_of, saved_names

pytestmark = pytest.mark.engine
WHEELS = ROOT / ".venv-engines"
MODEL_TYPES = ("cosmos3_omni", "granite_speech", "hunyuan_vl", "llava", "molmo2", "nemo_speechlm")


def written(engine: str) -> Mapping[str, str]:
    """The lines of every model type."""
    names = tomllib.loads((NAMES / f"{engine}.toml").read_text())["names"]
    return {each: text for types, text in names.items() for each in types.split()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_table_is_what_transformers_says(model_type: str) -> None:
    pairs = saved_names(model_of(model_type))
    lines = written("transformers")[model_type].strip().split("\n")
    assert lines == lines_of(pairs)
    table = NameTable.parse(lines)
    assert {module: table.names(module) for module in pairs} == pairs
    assert any(names != (module,) for module, names in pairs.items())


@pytest.mark.slow
def test_no_model_type_is_left_out() -> None:
    from transformers import CONFIG_MAPPING

    expected = {}
    for model_type in CONFIG_MAPPING:
        try:
            pairs = saved_names(model_of(model_type))
        except Exception:
            continue
        if lines := lines_of(pairs):
            expected[model_type] = "\n".join(["", *lines, ""]).removeprefix("\n")
    assert written("transformers") == expected


@pytest.mark.skipif(not WHEELS.exists(), reason="needs `make engines`: no .venv-engines")
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_cited_lines_are_there(engine: str) -> None:
    (package,) = WHEELS.glob(f"{engine}-*/{engine}")
    lines = tomllib.loads((NAMES / f"{engine}.toml").read_text())["lines"]
    for line in lines:
        name, _, text = line.partition(": ")
        known = [file for file in package.rglob("*.py") if file.as_posix().endswith(f"/{name}")]
        assert any(text in file.read_text(encoding="utf-8") for file in known), line
