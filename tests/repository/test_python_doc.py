"""docs/python.md: its examples run, in its order, and it lists every name of the package."""

import re

import pytest
from checkpoints import write_llama
from paths import ROOT

import fp4convert

TEXT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_examples_run(tmp_path, monkeypatch, capsys):
    write_llama(tmp_path / "Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert len(EXAMPLES) == 8
    assert names["made"].digest in printed
    assert "unknown-dialect" in printed
    assert 0 < float(printed.splitlines()[-1]) < 1  # half of the widest step, at amax 4


def test_every_name_is_there():
    for name in set(fp4convert.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", TEXT), name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"fp4convert\.(\w+)", TEXT)) - {"py"}))
def test_no_other_name_is(name):
    assert hasattr(fp4convert, name)
