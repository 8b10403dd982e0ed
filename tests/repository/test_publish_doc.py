"""docs/publish.md: its script converts, evaluates and pushes, and a missed gate commits nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakehub_uploads import UploadHub
from paths import ROOT
from tiny_chains import TEXT, make_model

pytestmark = pytest.mark.engine
PAGE = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")


def test_the_script_publishes_behind_its_gates(hub: UploadHub, tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "publish.sh").write_text(script)
    (tmp_path / "text.txt").write_text(TEXT)
    hub.add("org/m", make_model(tmp_path / "m", "Llama"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def publish(max_kl: str) -> subprocess.CompletedProcess[str]:
        words = {"PATH": path, "OWNER": "me", "TEXT": "text.txt", "MAX_KL": max_kl}
        words |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = ["bash", "publish.sh", "org/m"]
        environment = {**os.environ, **words}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    missed = publish("0.000001")
    assert (missed.returncode, "org/m: exit 6" in missed.stderr) == (1, True), missed.stderr
    assert "me/m-NVFP4" not in hub.repos
    met = publish("9")
    assert met.returncode == 0, met.stderr
    assert "nats a token" in hub.read("me/m-NVFP4")["README.md"].decode()
