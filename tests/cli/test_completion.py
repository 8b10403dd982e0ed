"""Shell completion, by bash itself: commands, options, and the words that options take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.numerics.formats import FORMATS, METHODS
from fp4convert.numerics.scale_layouts import LAYOUTS

BIN = Path(sys.executable).parent
RULES = {rule for fmt in FORMATS.values() for rule in fmt.scale_rules}
INSTALLED = "bash", "--noprofile", "--norc", "-c"


def completed(*words: str, script: str = "source <(fp4convert --show-completion)") -> list[str]:
    """What bash offers for the last of the words, after that script."""
    ask = "_fp4convert_completion fp4convert"
    line = (
        f'{script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); {ask}; printf "%s\\n" '
        f'"${{COMPREPLY[@]}}"'
    )
    variables = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        [*INSTALLED, line, "bash", "fp4convert", *words],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("qu",), {"quantize"}),
        (("tr",), {"transcode"}),
        (("quantize", "--sc"), {"--scale-rule"}),
        (("quantize", "--format", ""), set(FORMATS)),
        (("quantize", "x", "--format", "m"), {"mxfp4", "mxfp8"}),
        (("quantize", "--dialect", ""), set(DIALECTS)),
        (("transcode", "--dialect", "g"), {"gpt-oss", "gguf"}),
        (("transcode", "--scale-layout", ""), {*LAYOUTS, "interleaved", "appended"}),
        (("quantize", "--method", ""), set(METHODS)),
        (("quantize", "--scale-rule", ""), RULES),
        (("quantize", "--recipe", "omlp"), {"omlp_only"}),
        (("recipes", "deepseek_"), {"deepseek_v4"}),
        (("inspect", "./some"), set()),  # bash itself knows files
    ],
)
def test_bash_completes(words, expected):
    assert set(completed(*words)) == expected


def test_it_is_installed_for_the_shell_that_runs(tmp_path):
    """As the README says it, in a home of its own; then a new bash reads its own file."""
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [*INSTALLED, "fp4convert --install-completion; exit $?"],
        env=home,
        check=True,
        capture_output=True,
    )
    assert completed("qu", script=f'HOME="{tmp_path}"; source "{tmp_path}/.bashrc"') == ["quantize"]
