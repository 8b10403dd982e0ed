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

Every kernel of fp4convert has been measured.

## Others, 64M elements, bf16

Failed: torch is not there.
"""
XML = """<testsuites><testsuite>
<testcase classname="tests.numerics.test_on_gpu" name="a" time="1"/>
<testcase classname="tests.numerics.test_on_gpu" name="b" time="1">{}</testcase>
<testcase classname="tests.kernels.test_beyond_32_bits" name="c" time="1"/>
</testsuite></testsuites>"""
COUNTERS = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","search_nvfp4_bf16","gpu__time_duration.sum","nsecond","1,000"
"0","search_nvfp4_bf16","smsp__issue_active.avg.pct_of_peak_sustained_active","%","81.5"
"1","search_mxfp4_bf16","smsp__issue_active.avg.pct_of_peak_sustained_active","%","80.4"
-- profiler-mse: rc 0
"""
BYTES, LARGE, AMAX, QUANTIZE, DEQUANTIZE, GEMV, SEARCH, CLEAN, DIGESTS, SLOWER, CPU = (
    bar.what for bar in bars.BARS
)


def verdicts(folder: Path) -> dict[str, tuple[str, str]]:
    return {bar.what: bars.judged(bar, folder) for bar in bars.BARS}


PAIRS = [("nvfp4", "amax"), ("nvfp4", "mse"), ("nvfp4", "four-over-six")]
PAIRS += [("mxfp4", "even"), ("mxfp4", "mse")]
RUNS = [("cpu", 0), ("cuda", 0), ("auto", 0), ("cuda", 1)]


def rows(**changed: dict[str, object]) -> list[dict[str, object]]:
    """What whole.py writes; changed: by the device, of NVFP4 mse without --workers."""
    found: list[dict[str, object]] = [{"gigabytes": 20.0, "warms up": {"rc": 0}}]
    for fmt, rule in PAIRS:
        for device, workers in RUNS:
            took = {"cpu": "cpu", "cuda": "cuda:0", "auto": "cuda:0"}[device]
            spent = {"cpu": (4.0, 40.0), "cuda": (2.0, 18.0), "auto": (2.0, 18.0)}[device]
            row = {"gigabytes": 20.0, "format": fmt, "rule": rule, "device": device}
            row |= {"workers": workers, "seconds": spent[0], "cpu_seconds": spent[1]}
            row |= {"rc": 0, "took": took, "digest": f"{fmt} {rule}"}
            if (fmt, rule, workers) == ("nvfp4", "mse", 0):
                row |= changed.get(device, {})
            found.append({name: value for name, value in row.items() if value is not None})
    return found


FAILED = {"took": None, "digest": None, "problem": "told why"}
LATE = {**FAILED, "rc": None, "seconds": None, "cpu_seconds": None}


def whole(folder: Path, lines: list[dict[str, object]]) -> list[tuple[str, str]]:
    """What is found of these: digests, seconds, CPU-seconds."""
    (folder / "whole.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = verdicts(folder)
    return [found[DIGESTS], found[SLOWER], found[CPU]]


def test_of_an_empty_folder_everything_is_not_run(tmp_path):
    assert set(verdicts(tmp_path).values()) == {("", "not run")}


def test_the_page_of_kernels(tmp_path):
    (tmp_path / "gpu.md").write_text(PAGE)
    found = verdicts(tmp_path)
    assert found[AMAX] == ("98.1 % at least: amax_bf16, 256M elements, bf16", "met")
    assert found[QUANTIZE][0].startswith("91.9 % at least: quantize_mxfp4_bf16 even")
    assert (found[QUANTIZE][1], found[DEQUANTIZE][1]) == ("NOT MET", "NOT MET")
    assert found[GEMV] == ("", "not run")  # a row is missing


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace("| copy |", "Failed: x.\n| copy |"),
        PAGE.partition("\n## Products")[0],  # cut short
        PAGE.partition("\n## 256M")[0],
        PAGE.partition("\n## 256M")[0] + "\nEvery kernel of fp4convert has been measured.\n",
    ],
)
def test_of_a_page_that_is_not_whole_nothing_is_met(tmp_path, page):
    (tmp_path / "gpu.md").write_text(page)
    assert set(verdicts(tmp_path).values()) == {("", "not run")}


@pytest.mark.parametrize(
    ("inside", "end", "verdict"),
    [
        ("", "rc 0", "met"),
        ('<failure message="bytes"/>', "rc 1", "NOT MET"),
        ('<skipped message="no room"/>', "rc 0", "not run"),
        ("", "rc 124", "not run"),  # interrupted: the rest is missing
        ('<failure message="bytes"/>', "rc 124", "NOT MET"),
        ("", "rc 127", "not run"),
        ("", "rc 137", "not run"),
        ("", "rc 2", "not run"),
    ],
)
def test_bytes(tmp_path, inside, end, verdict):
    (tmp_path / "bytes.xml").write_text(XML.format(inside))
    (tmp_path / "bytes.txt").write_text(f"-- bytes: {end}, 10:00:00\n")
    found = verdicts(tmp_path)
    assert found[BYTES][1] == verdict
    assert found[LARGE][1] == ("met" if end in ("rc 0", "rc 1") else "not run")


def test_a_page_of_bytes_that_was_cut_is_not_read(tmp_path):
    (tmp_path / "bytes.xml").write_text(XML[:200])
    (tmp_path / "bytes.txt").write_text("-- bytes: rc 137, 10:00:00\n")
    assert verdicts(tmp_path)[BYTES] == ("", "not run")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COUNTERS, ("80.4 %: search_mxfp4_bf16", "met")),
        (COUNTERS.replace("80.4", "79.9"), ("79.9 %: search_mxfp4_bf16", "NOT MET")),
        (COUNTERS.replace("81.5", "9.5"), ("9.5 %: search_nvfp4_bf16", "NOT MET")),
        (COUNTERS.replace("mxfp4", "other"), ("", "not run")),  # of one format alone
        ("-- profiler-mse: rc 127, 10:00\n", ("", "not run")),
    ],
)
def test_counters(tmp_path, text, expected):
    (tmp_path / "ncu-mse.csv").write_text(text)
    assert verdicts(tmp_path)[SEARCH] == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("-- initcheck: rc 0", ("no errors", "met")),
        ("-- initcheck: rc 9", ("errors of initcheck", "NOT MET")),
        ("-- initcheck: rc 124", ("initcheck ended with 124", "not run")),
        ("-- initcheck: rc 127", ("initcheck ended with 127", "not run")),
        ("-- initcheck: not run, the time is up", ("", "not run")),
        ("", ("", "not run")),
    ],
)
def test_sanitizers(tmp_path, end, expected):
    others = [f"-- {tool}: rc 0, 10:00" for tool in ("memcheck", "racecheck", "synccheck")]
    (tmp_path / "sanitizer.txt").write_text("\n".join([others[0], f"{end}, 10:00", *others[1:]]))
    assert verdicts(tmp_path)[CLEAN] == expected


def test_whole_conversions(tmp_path):
    assert whole(tmp_path, rows()) == [
        ("5 pairs equal", "met"),
        ("0.50 of the CPU's seconds: nvfp4 amax", "met"),
        ("0.45", "met"),
    ]
    slow = rows(auto={"seconds": 4.2}, cuda={"cpu_seconds": 22.0, "digest": "another"})
    assert whole(tmp_path, slow) == [
        ("differ or are missing: nvfp4 mse", "NOT MET"),
        ("1.05 of the CPU's seconds: nvfp4 mse", "NOT MET"),
        ("0.55", "NOT MET"),
    ]


@pytest.mark.parametrize("code", [1, 124, 127, -9])
def test_a_conversion_that_failed_meets_nothing(tmp_path, code):
    """It was quick: its seconds say nothing."""
    failed = {**FAILED, "rc": code, "seconds": 0.1, "cpu_seconds": 0.1}
    on_cuda, on_auto = (f"nvfp4 mse on {device} ended with {code}" for device in ("cuda", "auto"))
    found = whole(tmp_path, rows(cuda=failed))
    assert found[0] == found[2] == (on_cuda, "NOT MET")
    assert found[1][1] == "met"
    found = whole(tmp_path, rows(auto=failed))
    assert found[0] == found[1] == (on_auto, "NOT MET")
    assert found[2][1] == "met"


def test_a_conversion_that_was_not_begun_is_not_run(tmp_path):
    assert {verdict for _, verdict in whole(tmp_path, rows(cpu=LATE))} == {"not run"}
    found = whole(tmp_path, rows()[:7])  # ended amid them: what is there meets nothing
    assert [verdict for _, verdict in found] == ["not run"] * 3
    bad = whole(tmp_path, rows()[:7] + rows(cuda={"digest": "another"})[7:9])
    assert bad[0] == ("", "not run")
    bad = whole(tmp_path, rows(cuda={"digest": "another"})[:9])
    assert bad[0] == ("differ or are missing: nvfp4 mse", "NOT MET")


def test_where_auto_takes_no_gpu_its_bar_is_not_run(tmp_path):
    lines = [row | ({"took": "cpu"} if row.get("device") == "auto" else {}) for row in rows()]
    assert whole(tmp_path, lines)[1] == ("auto took the CPU", "not run")


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
