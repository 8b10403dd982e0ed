"""The benchmarks' page and gate: made of the same rows, a loss is found in either direction, and
nothing is left out silently.

Decides nothing about speed; the kernels are measured by make bench.
"""

from __future__ import annotations

import json
import subprocess

import pytest

import bench
from cpu import compiled_libraries
from gpu import gpu_results
from harness import age, gate, measure
from harness.sections import Row, Section, as_document, from_document, printed

FAST = Section(
    "Kernels",
    "About them.",
    ("compiler", "kernel", "GB/s"),
    (
        Row(("gcc", "amax"), ("33.1",), 0.996, 1.0, judged_decimals=2),
        Row(("gcc", "quantize"), ("7.1",), 0.215, 0.22),
        Row(("gcc", "copy"), ("9.9",), 112.4),
        Row(("clang", "amax"), ("no clang: pip install ziglang",)),
    ),
    "share of read",
)
SLOW = Section(
    "Whole", "", ("checkpoint", "s"), (Row(("2 GB",), ("0.9",), 1.3, 1.8),), "ratio", is_floor=False
)
PAGE = """# GPU results

NVIDIA Thing 9, target sm_999 with hardware conversion; 2026-01-02.
driver 1.
Repeat with `python benchmarks/bench.py gpu`.

Medians.

## Comparison

All 3 kernels agree.

## 256M elements, bf16

| what | ms | GB/s | % of copy | bar | output |
| --- | --- | --- | --- | --- | --- |
| copy | 0.5000 | 2000 | 99.8 |  | not compared |
| quantize_naive | 2.0000 | 300 | 15.0 |  | bytes equal |
| quantize_nvfp4_bf16 | 0.4000 | 1900 | 93.1 | >= 92 met | bytes equal |

## 64M elements, fp16

| what | ms | GB/s | % of copy | bar | output |
| --- | --- | --- | --- | --- | --- |
| amax_fp16 | 0.1000 | 1900 | 96.9 | >= 97 NOT MET | equal |

## Others, 64M elements, bf16

| what | ms | GB/s | % of copy | bar | output |
| --- | --- | --- | --- | --- | --- |
| torchao nvfp4_quantize |  |  |  |  | ImportError: none |
"""


def scaled(section: Section, factor: float) -> Section:
    rows = tuple(
        Row(row.labels, row.cells, row.ratio and row.ratio * factor, row.bar, row.judged_decimals)
        for row in section.rows
    )
    return Section(
        section.title,
        section.about,
        section.headings,
        rows,
        section.ratio_heading,
        section.is_floor,
    )


def document_of(**parts: list[Section]) -> dict:
    return {
        name: {"machine": "a machine", "sections": [as_document(each) for each in found]}
        for name, found in parts.items()
    }


def test_a_table_has_figures_ratio_and_verdict():
    lines = FAST.markdown().splitlines()
    assert lines[:3] == ["## Kernels", "", "About them."]
    assert lines[4:] == [
        "| compiler | kernel | GB/s | share of read | bar |",
        "| --- | --- | --- | --- | --- |",
        "| gcc | amax | 33.1 | 0.996 | >= 1 met |",
        "| gcc | quantize | 7.1 | 0.215 | >= 0.22 NOT MET |",
        "| gcc | copy | 9.9 | 112 |  |",
        "| clang | amax | no clang: pip install ziglang |  |  |",
    ]
    assert SLOW.markdown().splitlines()[-1] == "| 2 GB | 0.9 | 1.30 | <= 1.8 met |"


def test_only_a_row_that_says_so_is_rounded_before_it_is_judged():
    assert Row((), (), 0.994, 1.0, judged_decimals=2).judged(True) == ">= 1 NOT MET"
    assert Row((), (), 0.2199, 0.22).judged(True) == ">= 0.22 NOT MET"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(None, ""), (0.0364, "0.036"), (1.014, "1.01"), (45.67, "45.7"), (1234.5, "1234")],
)
def test_ratios_are_printed_with_three_digits(ratio, text):
    assert printed(ratio) == text


@pytest.mark.parametrize("section", [FAST, SLOW, Section("Bare", "No table.")])
def test_a_section_is_the_same_after_json(section):
    assert from_document(json.loads(json.dumps(as_document(section)))) == section


@pytest.mark.parametrize(
    ("factor", "lost"),
    [
        (1.0, []),
        (0.76, []),
        (0.74, ["Kernels / gcc / amax", "Kernels / gcc / quantize", "Kernels / gcc / copy"]),
        (1.24, []),
        (1.26, ["Whole / 2 GB"]),
    ],
)
def test_a_loss_of_more_than_a_quarter_is_found_in_both_directions(factor, lost):
    found = gate.compare([FAST, SLOW], [scaled(FAST, factor), scaled(SLOW, factor)])
    assert len(found) == 4
    assert [str(each).partition(":")[0] for each in found if each.is_lost] == lost


def test_a_loss_is_told_with_both_ratios():
    (only,) = gate.compare([SLOW], [scaled(SLOW, 2)])
    assert str(only) == "Whole / 2 GB: 1.30 committed, 2.60 now (-100%)"


def test_seconds_are_not_compared_with_those_of_another_day():
    began = Section("Start", "", ("command",), (Row(("merge",), (), 0.18, 0.4),), gate.SECONDS)
    assert gate.ratios([began, SLOW]).keys() == {("Whole", "2 GB")}


def test_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two rows are named Kernels / gcc / amax"):
        gate.ratios([FAST, FAST])


def test_one_part_replaces_its_own_rows_alone(tmp_path, monkeypatch):
    path = tmp_path / "cpu.json"
    bench.write(document_of(kernels=[FAST], conversion=[SLOW]), path)
    monkeypatch.setattr(bench, "measure", lambda part, is_quick=False: [scaled(SLOW, 2)])
    bench.bench(["conversion"], path)
    document = json.loads(path.read_text())
    assert document["kernels"] == json.loads(json.dumps(document_of(kernels=[FAST])["kernels"]))
    assert document["conversion"]["sections"][0]["rows"][0][2] == 2.6
    page = path.with_suffix(".md").read_text()
    assert page == bench.page_of(document)
    assert "| gcc | amax | 33.1 | 0.996 | >= 1 met |" in page
    assert "| 2 GB | 0.9 | 2.60 | <= 1.8 NOT MET |" in page
    assert "Of 3 ratios with a bar, 1 meet it and 2 do not" in page
    assert "Part `startup`: not measured yet." in page


def run_check(tmp_path, monkeypatch, *measured: Section) -> int:
    """Exit status where the kernels measure so, one time after the other."""
    path = tmp_path / "cpu.json"
    bench.write(document_of(kernels=[FAST]), path)
    turns = iter(measured)
    monkeypatch.setattr(
        bench,
        "measure",
        lambda part, is_quick=False: [next(turns)] if is_quick else pytest.fail("not quick"),
    )
    return bench.check(["kernels"], path)


def test_the_check_passes_where_nothing_is_lost(tmp_path, monkeypatch, capsys):
    assert run_check(tmp_path, monkeypatch, scaled(FAST, 0.9)) == 0
    assert "kernels: 3 ratios compared with a machine" in capsys.readouterr().out


def test_the_check_fails_where_a_ratio_is_lost_twice(tmp_path, monkeypatch, capsys):
    assert run_check(tmp_path, monkeypatch, scaled(FAST, 0.5), scaled(FAST, 0.6)) == 1
    assert (
        "LOST Kernels / gcc / quantize: 0.215 committed, 0.129 now (-40%)"
        in capsys.readouterr().out
    )


def test_a_loss_that_does_not_repeat_is_noise(tmp_path, monkeypatch):
    assert run_check(tmp_path, monkeypatch, scaled(FAST, 0.5), FAST) == 0


def test_the_check_fails_where_there_is_nothing_to_compare(tmp_path, monkeypatch, capsys):
    assert run_check(tmp_path, monkeypatch, SLOW) == 1
    assert "0 ratios compared" in capsys.readouterr().out


def test_the_check_measures_nothing_where_no_figures_are_committed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda part, is_quick=False: pytest.fail("measured"))
    assert bench.check(["kernels"], tmp_path / "cpu-avx2.json") == 1
    assert "cpu-avx2.json to compare with: run `make bench` first" in capsys.readouterr().err


def test_pages_that_are_not_of_this_code_are_named(tmp_path):
    """A page lives through 30 commits that touch what it measures, and any number of others."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(file: str, count: int = 1) -> str:
        for _ in range(count):
            with (tmp_path / file).open("a") as out:
                out.write("x")
            git("add", "-A")
            git("commit", "-qm", file)
        return git("rev-parse", "--short=7", "HEAD")

    git("init", "-q")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "docs").mkdir()
    first = commit("kernels/a.c")
    second = commit("kernels/a.c")
    commit("kernels/a.c", age.MOST_COMMITS)
    commit("docs/a.md", 3)
    pages = tmp_path / "results"
    pages.mkdir()
    (pages / "cpu.md").write_text(f"Part a: commit {first}; b. Part b: commit {second}; b.")
    (pages / "host.md").write_text(f"commit {first}; 2026")
    (pages / "mixed-avx2.md").write_text(f"commit {second}-dirty; 2026")
    (pages / "hub.md").write_text("commit 0123456; 2026")
    (pages / "fidelity.md").write_text("no word of it")
    assert list(age.old_pages(pages, tmp_path)) == [
        f"cpu.md is of {first}: since then 31 commits have touched what it measures; expected 30 at"
        " most",
        "fidelity.md names no commit",
        "hub.md is of 0123456, which is no commit here",
        f"mixed-avx2.md was measured on files that no commit has ({second}-dirty)",
    ]


def test_every_page_of_results_is_known_to_be_of_some_code():
    assert [page.stem for page in measure.RESULTS.glob("*.md")]
    list(age.old_pages())  # KeyError for a page that nobody knows


def test_nothing_is_measured_on_files_that_no_commit_has(monkeypatch, capsys):
    monkeypatch.setattr(bench, "commit", lambda: "0123456-dirty")
    monkeypatch.setattr(bench, "measure", lambda part: pytest.fail("measured"))
    assert bench.main(["kernels"]) == 1
    assert bench.main(["host"]) == 1
    assert "commit 0123456-dirty; expected a commit: commit your files first" in (
        capsys.readouterr().err
    )


def test_every_part_can_be_measured():
    modules = (*bench.PARTS.values(), *bench.PAGES.values())
    assert all(
        (measure.BENCHMARKS / f"{module.replace('.', '/')}.py").is_file() for module in modules
    )
    assert set(bench.UNCHECKED) < set(bench.PARTS)


@pytest.mark.parametrize(
    "path", sorted(bench.RESULTS.parent.glob("cpu*.json")), ids=lambda path: path.stem
)
def test_the_committed_page_is_that_of_the_committed_figures(path):
    assert path.with_suffix(".md").read_text(encoding="utf-8") == bench.page_of(bench.read(path))


def test_gpu_pages_give_the_naive_kernel_beside_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_results, "RESULTS", tmp_path)
    (none,) = gpu_results.sections(False)
    assert none.about.startswith("No GPU results yet: `make gpu`")
    (tmp_path / "gpu-thing-9.md").write_text(PAGE)
    (section,) = gpu_results.sections(False)
    assert section.title == "GPU: NVIDIA Thing 9"
    assert "](gpu-thing-9.md)" in section.about
    assert not age.COMMIT.search(section.about)  # that page is judged by its own age
    assert [row.labels[1] for row in section.rows] == [
        "copy",
        "quantize_naive",
        "quantize_nvfp4_bf16",
        "torchao nvfp4_quantize",
    ]
    assert section.verdicts() == [">= 0.92 met"]
    assert section.rows[1].ratio == 0.15
    assert section.rows[3] == Row(
        ("Others, 64M elements, bf16", "torchao nvfp4_quantize"), ("", "", "ImportError: none")
    )


def test_turns_are_taken_and_the_first_is_not_counted():
    turns = iter(range(100))
    ours, theirs = measure.in_turn(
        lambda: next(turns), lambda: next(turns), rounds=3, clock=lambda work: work()
    )
    assert (ours, theirs) == ((2, 4, 6), (3, 5, 7))
    assert measure.median_ratio((2.0, 9.0, 4.0), (1.0, 1.0, 1.0)) == 4


def test_the_compiler_of_a_library_is_read_from_it(tmp_path):
    library = tmp_path / "libcpu.so"
    library.write_bytes(b"\0GCC: (Debian 12.2.0-14) 12.2.0\0")
    assert compiled_libraries.compiler_of(library) == ("gcc", "12.2.0")
    library.write_bytes(b"\0GCC: (Debian 12.2.0-14) 12.2.0\0clang version 19.1.7\0")
    assert compiled_libraries.compiler_of(library) == ("clang", "19.1.7")


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        compiled_libraries.importlib.util,
        "find_spec",
        lambda name: None if name == "ziglang" else name,
    )
    monkeypatch.setattr(compiled_libraries, "ROOT", tmp_path)
    with pytest.raises(
        compiled_libraries.UnavailableError, match=r"no clang: .*pip install cmake ziglang"
    ):
        compiled_libraries.built_by_the_other(compiled_libraries.installed())
