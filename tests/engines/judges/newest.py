"""Say which rows of configs/engines the newest release of a package breaks; ends with 1 for any.

newest.py vllm|sglang  a line that a row cites is not in the newest wheel
newest.py PACKAGE      it is installed here in place of the pinned one, and a test fails that
                       proves a row: transformers, compressed-tensors, mlx-lm and others
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from cited_lines import stale
from paths import ROOT

from fp4convert.engines.files import known_engines
from fp4convert.engines.versions import read_version

PIP = (sys.executable, "-m", "pip")
ROWS = [(engine, row) for engine in known_engines() for row in engine.rows]
READ = {engine.key for engine, row in ROWS if row.lines}  # engines whose code was read


def uncited(package: str, folder: Path) -> Iterator[str]:
    """Rows whose cited lines the newest wheel lacks."""
    subprocess.run(
        [*PIP, "download", "--quiet", "--no-deps", "--dest", folder, package], check=True
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    version = wheel.name.split("-")[1]
    for engine, row in ROWS:
        is_about = engine.key == package and read_version(version) in row.versions
        if is_about and (missing := stale(row, folder / package)):
            yield f"{package} {version}: {row.says} ({missing[0]})"


def unproved(package: str, folder: Path) -> Iterator[str]:
    """Rows whose tests fail with the newest release."""
    constraint = ("--constraint", ROOT / "constraints.txt")
    subprocess.run([*PIP, "install", "--quiet", "--upgrade", *constraint, package], check=True)
    proofs, seen = sorted({row.proof for _, row in ROWS if row.proof}), folder / "seen.xml"
    words = ["-m", "not slow and not gpu", f"--junitxml={seen}", *proofs]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, check=False)
    failed = {
        f"{case.get('classname', '').replace('.', '/')}.py": case.get("name")
        for case in ElementTree.parse(seen).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    }
    for engine, row in ROWS:
        if row.proof in failed:
            yield f"{engine.name}: {row.says} ({row.proof}: {failed[row.proof]})"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        find = uncited if sys.argv[1] in READ else unproved
        broken = list(find(sys.argv[1], Path(place)))
    print(*(f"BROKEN {row}\n" for row in broken), sep="", end="")
    sys.exit(bool(broken))
