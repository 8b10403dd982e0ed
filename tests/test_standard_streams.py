"""Words for people that have nowhere to go end no work; a document that cannot be printed is an
error.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import WAIT_SECONDS, write_llama

COMMAND = str(Path(sys.executable).with_name("fp4convert"))


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "m")


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_a_stderr_that_takes_nothing_ends_no_work(where, source, tmp_path):
    """The note of what part this is, and the progress of its phases, are lost."""
    talking = (
        "import fp4convert.progress as p; p.LINE_SECONDS = 0.0; from fp4convert.__main__ "
        "import main; main()"
    )
    options = (
        f"quantize {source} --format nvfp4 --json -o {tmp_path / 'q'} --shard-index 0 "
        "--num-shards 2"
    )
    ended = shell(f'{sys.executable} -c "{talking}" {options} {where}')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["share"] == {"index": 0, "of": 2, "shards": 1}


@pytest.mark.parametrize("where", [">&-", ">/dev/full", "| true"])
def test_an_error_that_stdout_does_not_take_keeps_its_exit_code(where, tmp_path):
    ended = shell(
        f"{COMMAND} inspect {tmp_path / 'nothing'} --json {where}; exit ${{PIPESTATUS[0]}}"
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error[no-source]: ")
    assert "Traceback" not in ended.stderr


def test_a_closed_stdout_is_no_reason_to_convert_nothing(source, tmp_path):
    assert (
        shell(f"{COMMAND} quantize {source} --format nvfp4 -o {tmp_path / 'q'} >&-").returncode == 0
    )
    assert (tmp_path / "q" / "quantization_config.json").exists()


@pytest.mark.parametrize("words", ["--version", "quantize --help", "--show-completion bash"])
@pytest.mark.parametrize(
    ("where", "code"), [("| true", 141), (">/dev/full", 5), ("1</dev/null", 5)]
)
def test_help_that_stdout_does_not_take_is_no_bug(where, code, words):
    ended = shell(f"{COMMAND} {words} {where}; exit ${{PIPESTATUS[0]}}")
    assert ended.returncode == code
    assert ended.stderr == "" or ended.stderr.startswith("error[cannot-print]: ")
