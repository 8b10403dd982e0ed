"""Damaged files of an interrupted run are named; without their folder it begins anew."""

import shutil

import pytest
from tiny_chains import calibrate

from fp4convert.calibration import run as calibration_run

pytestmark = pytest.mark.engine


class Death(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("kind", ["hidden-1-*", "part-*.json", "tokens.npz"])
def test_a_damaged_file_is_named_and_without_the_folder_all_begins_anew(
    kind, damage, tmp_path, llama, words, monkeypatch
):
    output, made, count = tmp_path / "a.safetensors", calibration_run.write_part, iter(range(9))

    def fail(*arguments):
        if next(count) == 1:
            raise Death
        return made(*arguments)

    monkeypatch.setattr(calibration_run, "write_part", fail)
    with pytest.raises(Death):
        calibrate(llama, output, "--text", words)
    monkeypatch.undo()
    state = tmp_path / f".{output.name}.calibration"
    (victim, *_) = sorted(state.glob(kind))
    victim.unlink() if damage == "gone" else victim.write_bytes(victim.read_bytes()[:-7])
    again = calibrate(llama, output, "--text", words)
    if damage == "gone" and not kind.startswith("hidden"):  # not finished, as it seems
        assert again.code == 0, again.err
        return
    error = again.json["error"]
    assert (again.code, error["code"]) == (5, "damaged")
    assert error["message"].startswith(f"{victim}: cannot be read")
    assert error["next"].endswith(f": {state}")
    shutil.rmtree(state)
    assert calibrate(llama, output, "--text", words).code == 0
