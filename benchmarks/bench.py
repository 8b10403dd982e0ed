"""make bench: every measurement, written as one Markdown page to benchmarks/results/cpu.md."""

from __future__ import annotations

import datetime
import subprocess
import sys

from measure import ROOT, machine

PARTS = ("kernels", "conversion", "planning", "startup")


def main() -> None:
    parts = [
        subprocess.run([sys.executable, ROOT / "benchmarks" / f"{part}.py"], check=True, capture_output=True, text=True)
        for part in PARTS
    ]
    head = f"# CPU results\n\n{machine()}; {datetime.date.today()}. Repeat with `make bench`.\n\n"
    page = head + "\n".join(part.stdout.strip() + "\n" for part in parts)
    (ROOT / "benchmarks" / "results" / "cpu.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
