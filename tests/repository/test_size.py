"""What a plain quantize enters and loads, and how large the house is: limits that only go down.

A run in a process of its own is watched with sys.setprofile in all its threads; branches, classes
and lines are counted from the text. After a change that needs more, look for what it should not
load; after one that needs less, lower the limit.
"""

import ast
import json
import subprocess
import sys

import pytest
from checkpoints import write_llama
from paths import ROOT

PACKAGE = ROOT / "fp4convert"
MOST_MODULES, MOST_LINES_LOADED = 138, 26_860
MOST_FILES, MOST_FUNCTIONS = 106, 776
MOST_BYTE_FILES = 18  # that the threads which make the bytes enter
MOST_PACKAGE_LINES, MOST_TEST_LINES, MOST_CLASSES = 64_064, 100_152, 425

WATCH = """
import sys, threading
calls = []
def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and (at := name.rfind("/fp4convert/")) >= 0:
        calls.append((threading.current_thread().name, name[at + 12:], frame.f_code.co_qualname))
threading.setprofile(note); sys.setprofile(note)
sys.argv = ["fp4convert", "quantize", {source!r}, "--format", "nvfp4", "-o", {output!r}, "-q"]
from fp4convert.__main__ import main
try: main()
except SystemExit as end: assert not end.code, end.code
sys.setprofile(None); threading.setprofile(None)
import json; print("CALLS", json.dumps(calls))
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """(thread, file, name of the function) of every call of a plain run."""
    folder = tmp_path_factory.mktemp("size")
    source = write_llama(folder / "source")
    code = WATCH.format(source=str(source), output=str(folder / "out"))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    line = next(line for line in ended.stdout.splitlines() if line.startswith("CALLS"))
    return json.loads(line.removeprefix("CALLS"))


def classes_of(file):
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_a_plain_quantize_loads_what_it_uses(calls):
    loaded = {file for _, file, name in calls if name == "<module>"}
    lines = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in loaded)
    assert len(loaded) <= MOST_MODULES
    assert lines <= MOST_LINES_LOADED


def test_a_plain_quantize_enters_few_files_and_functions(calls):
    files = {file for _, file, _ in calls}
    classes = {file: classes_of(file) for file in files}
    real = [
        (thread, file, name)
        for thread, file, name in calls
        if name != "<module>"
        and not (leaf := name.split(".")[-1]).startswith("<")
        and leaf not in classes[file]
    ]
    assert len({file for _, file, _ in real}) <= MOST_FILES
    assert len({(file, name) for _, file, name in real}) <= MOST_FUNCTIONS
    makers = {thread for thread, file, _ in real if file == "makers/fresh.py"} - {"MainThread"}
    entered = [{file for own, file, _ in real if own == thread} for thread in makers]
    assert entered
    # The last shard's thread hands work to others, and hashes.
    assert min(map(len, entered)) <= MOST_BYTE_FILES


def test_the_house_does_not_grow():
    def lines(folder):
        return sum(file.read_text(encoding="utf-8").count("\n") for file in folder.rglob("*.py"))

    classes = sum(
        isinstance(node, ast.ClassDef)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )
    assert lines(PACKAGE) <= MOST_PACKAGE_LINES
    assert lines(ROOT / "tests") <= MOST_TEST_LINES
    assert classes <= MOST_CLASSES
