"""A bar is judged by what the first run has left; what is not there or not finished is not run.

The files here are typed by hand, as bench.py gpu, pytest, ncu and the script write them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu import bars

PAGE = """# GPU results

NVIDIA Thing 9, target sm_999 with hardware conversion; 2026-01-02.
driver 1.

## 256M elements, bf16

| what | ms | GB/s | % of copy | bar | output |
| --- | --- | --- | --- | --- | --- |
| copy | 0.5000 | 2000 | 99.8 |  |  |
| amax_bf16 | 0.2000 | 2500 | 98.1 | >= 97 met | bytes equal |
| quantize_naive | 2.0000 | 300 | 15.0 |  | bytes equal |
| quantize_nvfp4_bf16 | 0.4000 | 1900 | 93.1 | >= 92 met | bytes equal |
| quantize_mxfp4_bf16 even | 0.4000 | 1900 | 91.9 | >= 92 NOT MET | bytes equal |
| dequantize_nvfp4_bf16 | 0.4000 | 1900 | 93.1 | >= 92 met | DIFFERS: row 1 |

## Products, 16384 x 16384

| what | ms | GB/s | % of copy | bar | output |
| --- | --- | --- | --- | --- | --- |
| gemv_nvfp4_fp16 | 0.4000 | 1900 | 95.0 | >= 90 met | product right |
| gemv_mxfp4_fp16 |  |  |  |  | not run: the time is up |
"""
XML = """<testsuites><testsuite>
<testcase classname="tests.numerics.test_on_gpu" name="a" time="1"/>
<testcase classname="tests.numerics.test_on_gpu" name="b" time="1">{}</testcase>
<testcase classname="tests.kernels.test_beyond_32_bits" name="c" time="1"/>
</testsuite></testsuites>"""
COUNTERS = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","search_nvfp4_bf16","smsp__issue_active.avg.pct_of_peak_sustained_active","%","81.5"
"1","search_nvfp4_bf16","smsp__issue_active.avg.pct_of_peak_sustained_active","%","80.4"
"1","search_mxfp4_bf16","smsp__issue_active.avg.pct_of_peak_sustained_active","%","10"
-- profiler: rc 0
== profiler-others
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","gemv_nvfp4_fp16","dram__bytes.sum","byte","1,000"
"""
BYTES, LARGE, AMAX, QUANTIZE, DEQUANTIZE, GEMV, SEARCH, CLEAN, DIGESTS, SLOWER, CPU = (
    bar.what for bar in bars.BARS
)


def verdicts(folder: Path) -> dict[str, tuple[str, str]]:
    return {bar.what: bars.judged(bar, folder) for bar in bars.BARS}


def row(device: str, seconds: float, cpu: float, **more: object) -> str:
    named = {"format": "nvfp4", "rule": "mse", "device": device, "workers": 0, "rc": 0}
    found = {"took": device, "digest": "d", "seconds": seconds, "cpu_seconds": cpu}
    return json.dumps({**named, **found, **more})


def test_of_an_empty_folder_everything_is_not_run(tmp_path):
    assert set(verdicts(tmp_path).values()) == {("", "not run")}


def test_the_page_of_kernels(tmp_path):
    (tmp_path / "gpu.md").write_text(PAGE)
    found = verdicts(tmp_path)
    assert found[AMAX] == ("98.1 % at least: amax_bf16, 256M elements, bf16", "met")
    assert found[QUANTIZE][0].startswith("91.9 % at least: quantize_mxfp4_bf16 even")
    assert (found[QUANTIZE][1], found[DEQUANTIZE][1]) == ("NOT MET", "NOT MET")
    assert found[GEMV] == ("", "not run")  # a row is missing
    (tmp_path / "gpu.md").write_text(PAGE.replace("| copy |", "Failed: x.\n| copy |"))
    assert verdicts(tmp_path)[AMAX] == ("", "not run")


@pytest.mark.parametrize(
    ("inside", "end", "verdict"),
    [
        ("", "rc 0", "met"),
        ('<failure message="bytes"/>', "rc 1", "NOT MET"),
        ('<skipped message="no room"/>', "rc 0", "not run"),
        ("", "rc 124", "not run"),  # interrupted: the rest is missing
    ],
)
def test_bytes(tmp_path, inside, end, verdict):
    (tmp_path / "bytes.xml").write_text(XML.format(inside))
    (tmp_path / "bytes.txt").write_text(f"-- bytes: {end}, 10:00:00\n")
    found = verdicts(tmp_path)
    assert found[BYTES][1] == verdict
    assert found[LARGE][1] == ("not run" if "124" in end else "met")


def test_counters(tmp_path):
    (tmp_path / "ncu.csv").write_text(COUNTERS)
    assert verdicts(tmp_path)[SEARCH] == ("80.4 %", "met")
    (tmp_path / "ncu.csv").write_text(COUNTERS.replace("80.4", "79.9"))
    assert verdicts(tmp_path)[SEARCH] == ("79.9 %", "NOT MET")


def test_sanitizers(tmp_path):
    lines = [f"-- {tool}: rc 0, 10:00" for tool in bars.SANITIZERS]
    (tmp_path / "sanitizer.txt").write_text("\n".join(lines))
    assert verdicts(tmp_path)[CLEAN] == ("no errors", "met")
    (tmp_path / "sanitizer.txt").write_text(
        "\n".join(lines).replace("initcheck: rc 0", "initcheck: rc 9")
    )
    assert verdicts(tmp_path)[CLEAN] == ("errors of initcheck", "NOT MET")
    (tmp_path / "sanitizer.txt").write_text("\n".join(lines[:3]))
    assert verdicts(tmp_path)[CLEAN] == ("", "not run")


def test_whole_conversions(tmp_path):
    path = tmp_path / "whole.jsonl"
    path.write_text(
        "\n".join((row("cpu", 2, 20), row("cuda", 1, 9), row("auto", 2.1, 9, took="cuda:0")))
    )
    found = verdicts(tmp_path)
    assert found[DIGESTS] == ("1 pairs equal", "met")
    assert found[SLOWER] == ("1.05 of the CPU's seconds: nvfp4 mse", "NOT MET")
    assert found[CPU] == ("0.45", "met")
    path.write_text(
        "\n".join(
            (row("cpu", 2, 20), row("cuda", 1, 11, digest="e"), row("auto", 2, 9, took="cpu"))
        )
    )
    found = verdicts(tmp_path)
    assert found[DIGESTS] == ("differ or are missing: nvfp4 mse", "NOT MET")
    assert (found[SLOWER][1], found[CPU]) == ("met", ("0.55", "NOT MET"))
    path.write_text(
        "\n".join((row("cpu", 2, 20), row("cuda", 1, 11, problem="not run: the time is up")))
    )
    assert {verdicts(tmp_path)[what][1] for what in (DIGESTS, SLOWER)} == {"not run"}


def test_a_table_has_a_column_for_each_gpu(tmp_path, capsys):
    head, *lines = bars.rows_of(tmp_path)
    assert head == ("", "bar", "any GPU")
    assert [line[2] for line in lines] == ["not run"] * len(bars.BARS)
    (tmp_path / "gpu.md").write_text(PAGE)
    assert bars.main([str(tmp_path)]) == 0
    assert f"met: {AMAX}: 98.1 %" in capsys.readouterr().out
    head, *lines = bars.rows_of(tmp_path)
    assert head == ("", "bar", "NVIDIA Thing 9")
    assert lines[2][2] == "met: 98.1 % at least: amax_bf16, 256M elements, bf16"
    assert lines[0][2] == "not run"
