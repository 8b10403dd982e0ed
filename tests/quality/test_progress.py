"""What inspect, verify and compare tell of their progress: bytes, of real totals, all done."""

from typing import Any

import pytest
from checkpoints import run, write_llama

import fp4convert
from fp4convert.storage.open import open_source


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("made")
    source = write_llama(folder / "M")
    for fmt in ("nvfp4", "mxfp4"):
        assert run("quantize", source, "--format", fmt, "-o", folder / fmt).code == 0
    return {name: str(folder / name) for name in ("M", "nvfp4", "mxfp4")}


def watched(function: Any, *arguments: str, **options: Any) -> dict[str, tuple[int, int]]:
    """Every phase that counts bytes: how many were done, of how many."""
    phases = fp4convert.Phases()
    function(*arguments, **options, phases=phases)
    phases.end()
    return {
        meter.verb: (meter.done_nbytes, meter.total_nbytes)
        for meter in phases.meters
        if meter.total_nbytes
    }


def test_phases_end_with_all_bytes_done(made):
    a, source = made["nvfp4"], made["M"]
    seen = {
        "inspect": watched(fp4convert.inspect, a),
        "verify": watched(fp4convert.verify, a),
        "by source": watched(fp4convert.verify, a, source=source),
        "compare": watched(fp4convert.compare, [a, made["mxfp4"]], source=source),
    }
    assert {name: list(found) for name, found in seen.items()} == {
        "inspect": ["scales"],
        "verify": ["scales", "hash", "kept", "codes"],
        "by source": ["scales", "layout", "hash", "kept", "compare"],
        "compare": ["measure"],
    }
    for found in seen.values():
        assert all(done == total for done, total in found.values()), found


def test_the_whole_source_is_counted_where_it_is_compared(made):
    nbytes = sum(ref.nbytes for ref in open_source(made["M"]).checkpoint.tensors)
    assert watched(fp4convert.verify, made["nvfp4"], source=made["M"])["compare"][1] == nbytes


def test_nothing_is_said_of_short_work_and_nothing_with_q(made):
    for words in (("inspect",), ("verify",), ("verify", "--source", made["M"])):
        for more in ((), ("-q",), ("--json",)):
            assert run(words[0], made["nvfp4"], *words[1:], *more).err == ""
    lines = run("verify", made["nvfp4"], "--source", made["M"], "-v").err.splitlines()
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        "headers",
        "scales",
        "layout",
        "hash",
        "kept",
        "compare",
    ]
