"""What quantize refuses of a calibration."""

from __future__ import annotations

from checkpoints import run


def refused(source, tmp_path, *options):
    """The error of a command that writes nothing, and whose message is one line."""
    outcome = run(
        "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--json", *options
    )
    assert outcome.code == 2, outcome.err
    assert not (tmp_path / "out").exists()
    assert "\n" not in outcome.json["error"]["message"]
    assert outcome.json["error"]["next"]
    return outcome.json["error"]
