"""Records that lie about sound artifacts: what breaks an engine is an error, the rest is none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from artifacts import quantize
from checkpoints import run, write_llama

TABLE = Path(__file__).parent / "record_lies.txt"
# Where a record lies: its file, and the key of it.
PLACES = {
    "config": ("config.json", ["quantization_config"]),
    "mlx": ("config.json", ["quantization"]),
    "hf": ("hf_quant_config.json", []),
    "ours": ("quantization_config.json", []),
}
ARTIFACTS = {
    "ct": ("nvfp4", "compressed-tensors", 16),
    "ct-mx": ("mxfp4", "compressed-tensors", 16),
    "ct-w4a4": ("nvfp4", "compressed-tensors", 4),
    "mo": ("nvfp4", "modelopt", 16),
    "quark-mx": ("mxfp4", "quark", 16),
    "quark-mx-w4a4": ("mxfp4", "quark", 4),
    "mlx": ("nvfp4", "mlx", 16),
}
BREAKS = {"refuses", "unset", "unread", "random"}


class Lie(NamedTuple):
    """A row of the table."""

    artifact: str
    file: str
    key: str
    value: str
    vllm: str
    sglang: str
    other: str
    error: str
    asked: str
    why: str

    def tell(self, folder: Path) -> None:
        file, keys = PLACES[self.file]
        keys = [*keys, *([self.key] if self.file == "mlx" else filter(None, self.key.split(".")))]
        path = folder / file
        if not keys:
            path.unlink()
            return
        document = json.loads(path.read_text())
        at = document
        for key in keys[:-1]:
            at = at[key]
        if self.value == "GONE":
            del at[keys[-1]]
        else:
            at[keys[-1]] = json.loads(self.value)
        if self.file == "mlx":  # both of its records say so
            document["quantization_config"] = document["quantization"]
        path.write_text(json.dumps(document))


ROWS = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")][1:]
LIES = [Lie(*map(str.strip, re.split(r" \| ?", row))) for row in ROWS]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("artifacts")
    source = write_llama(root / "source")
    for name, (fmt, dialect, activations) in ARTIFACTS.items():
        words = ("--format", fmt, "--dialect", dialect, "--activations", activations)
        quantize(source, root / name, *words)
    return {name: root / name for name in ARTIFACTS}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: f"{lie.artifact} {lie.file} {lie.key}"[:60])
def test_what_breaks_an_engine_is_an_error(lie: Lie, artifacts, tmp_path):
    liar = tmp_path / "liar"
    shutil.copytree(artifacts[lie.artifact], liar, ignore=shutil.ignore_patterns(".fp4convert"))
    lie.tell(liar)
    asked = () if lie.asked == "-" else ("--for", lie.asked)
    errors = {
        finding["code"]
        for finding in run("inspect", liar, *asked, "--json").json["findings"]
        if finding["level"] == "error"
    }
    assert errors >= {lie.error} if lie.error != "-" else errors == set()
    if lie.file == "ours":
        return
    # As somebody else's, whose own records alone are there.
    (liar / "quantization_config.json").unlink()
    code = run("inspect", liar, *asked).code
    if lie.error == "-":
        assert code == 0
    elif {*BREAKS, "differs"} & {lie.vllm, lie.sglang, lie.other}:
        assert code in (2, 6) or run("inspect", liar, "--for", "vllm").code == 6


def test_the_table_calls_no_break_sound():
    outcomes = {lie: BREAKS & {lie.vllm, lie.sglang, lie.other} for lie in LIES}
    assert [lie for lie, broken in outcomes.items() if broken and lie.error == "-"] == []
    assert sum(map(bool, outcomes.values())) >= 75
    assert [lie for lie in LIES if lie.error == "-" and lie.asked != "-"] == []
    reasons = [
        lie.why for lie in LIES if lie.error == "-" and "exact" not in (lie.vllm, lie.sglang)
    ]
    assert all(reasons)
