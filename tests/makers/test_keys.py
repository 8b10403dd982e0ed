"""The repr of a maker is its part of a task's key: other bytes have another repr, in every process
the same, and nothing in it is an address.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import LAYER, run, write_llama
from fp4_sources import make_nvfp4_ct
from made_up_inputs import calibrate

from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import source_as_asked, take_apart
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source

ADDRESS = re.compile(r"0x[0-9a-f]{6,}|object at ")
DOWN = f"{LAYER}.mlp.down_proj"


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def reprs_of(source: Path, **options: object) -> dict[str, str]:
    """The makers' reprs of a plan, by the first output of each."""
    asked = QuantizeOptions(str(source), format=options.pop("format", "nvfp4"), **options)
    opened = source_as_asked(open_source(str(source)), asked)
    plan = prepare_quantize(take_apart(opened, asked))
    works = [work for task in plan.tasks for work in task.works]
    return {work.steps[0].outputs[0].name: repr(work.maker) for work in works}


def test_every_option_that_changes_bytes_of_a_module_changes_its_repr(source, tmp_path):
    """Each of these makes other bytes of down_proj, or of the scale beside them."""
    statistics = str(calibrate(tmp_path / "c.safetensors", source))
    scales = tmp_path / "scales.json"
    plain = reprs_of(source)
    modules = [name.removesuffix(".weight_packed") for name in plain if "packed" in name]
    groups = json.loads(
        run(
            "quantize", source, "--format", "nvfp4", "-o", tmp_path / "o", "--dry-run", "--json"
        ).out
    )["tensors"]
    made = [row["name"].removesuffix(".weight") for row in groups if row["action"] == "quantize"]
    scales.write_text(json.dumps(dict.fromkeys(made, 0.01)), encoding="utf-8")
    variants = {
        "rule": {"scale_rule": "amax"},
        "gptq": {"method": "gptq", "calibration": statistics},
        "damping": {"method": "gptq", "calibration": statistics, "damping": 0.2},
        "passes": {"method": "gptq", "calibration": statistics, "passes": 0},
        "importance": {"scale_rule": "importance", "calibration": statistics},
        "via": {"via": "fp8"},
        "activations": {"activations": 4},
        "input scale": {"activations": 4, "calibration": statistics},
        "given": {"global_scale": str(scales)},
        "format": {"format": "mxfp4"},
        "dialect": {"dialect": "modelopt"},
    }
    assert modules
    found = {"plain": _of(plain, DOWN)}
    for name, options in variants.items():
        found[name] = _of(reprs_of(source, **options), DOWN)
    assert len(set(found.values())) == len(found), found


def _of(reprs: dict[str, str], module: str) -> str:
    return next(text for name, text in reprs.items() if name.startswith(module))


def test_reprs_are_the_same_in_every_process_and_hold_no_address(source, tmp_path):
    packed = tmp_path / "packed"
    make_nvfp4_ct(packed)
    for place in (source, packed):
        code = (
            f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
            "from test_keys import reprs_of\n"
            f"print(sorted(reprs_of({str(place)!r}).items()))"
        )
        texts = {
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed, "PATH": ""},
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(texts) == 1
        assert not ADDRESS.search(texts.pop())


def test_a_group_has_one_maker_in_each_shard(source):
    """q, k and v share a scale: those of one shard are measured and made together."""
    asked = QuantizeOptions(str(source), format="nvfp4")
    plan = prepare_quantize(take_apart(open_source(str(source)), asked))
    for task in plan.tasks:
        of_group: dict[str, set[int]] = {}
        for step in task.steps:
            if step.group:
                of_group.setdefault(step.group, set()).add(id(step.maker))
        assert of_group
        assert all(len(makers) == 1 for makers in of_group.values())
