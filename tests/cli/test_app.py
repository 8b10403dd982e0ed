"""app.py: what escapes is a bug of ours, and told as one."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_bug_of_ours_has_a_document_and_a_traceback():
    code = (
        "import fp4convert.cli.doctor as d, sys\n"
        "def fail(*a): raise KeyError('a name of hf_" + "x" * 30 + "')\n"
        "d.survey_sound = fail\n"
        "from fp4convert.__main__ import main\n"
        "main()"
    )
    for words in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-c", code, "doctor", *words],
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 1
        assert "KeyError" in done.stderr.splitlines()[-1]
        if words:
            error = json.loads(done.stdout)["error"]
            assert (error["code"], error["exit"]) == ("bug", 1)
            assert "KeyError: 'a name of ***'" in error["message"]
            assert error["next"].startswith("Report it")
        else:
            assert done.stdout == ""
