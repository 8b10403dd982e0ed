"""What calibrate needs, told before it begins; where its file may be; and what it says meanwhile
and when it is stopped.
"""

from __future__ import annotations

import signal
import time

import pytest
from checkpoints import run, start
from tiny_chains import LENGTH, SAMPLES, TEXT, calibrate, make_model
from tiny_models import read_tensors

from fp4convert.calibration import workdir
from fp4convert.progress import Phases
from fp4convert.storage.open import open_source

pytestmark = pytest.mark.engine
LAYERS, HIDDEN, WIDE = 3, 64, 96
MATRICES = 4 * (
    3 * HIDDEN**2 + WIDE**2
)  # of a layer: q, k and v share one; o; gate and up share one; down
STATISTICS = (
    LAYERS * (MATRICES + 12 * (3 * HIDDEN + WIDE)) + 4 * HIDDEN**2 + 12 * HIDDEN
)  # and the head
STATES = 3 * 4 * HIDDEN * LENGTH * SAMPLES


def have_free(monkeypatch, nbytes: int) -> None:
    monkeypatch.setattr(workdir, "free_nbytes", lambda place: nbytes)


def test_a_disk_that_is_too_small_is_known_beforehand(tmp_path, llama, words, monkeypatch):
    folder, needed = tmp_path / "new" / "one", 2 * STATISTICS + STATES
    have_free(monkeypatch, needed - 1)
    error = calibrate(llama, folder / "c.safetensors", "--text", words, "--gram", "full")
    assert (error.code, error.json["error"]["code"]) == (5, "disk-full")
    assert f"needs up to {needed:,} bytes" in error.json["error"]["message"]
    assert "--gram block:128" in error.json["error"]["next"]
    assert not (tmp_path / "new").exists()
    have_free(monkeypatch, needed)
    done = calibrate(llama, folder / "c.safetensors", "--text", words, "--gram", "full")
    assert done.code == 0
    assert (
        STATISTICS
        < done.json["output_bytes"]
        == (folder / "c.safetensors").stat().st_size
        < STATISTICS + 20_000
    )  # a header
    assert "Gram matrices of a layer 86.0 kB of memory" in done.err
    assert [path.name for path in folder.iterdir()] == ["c.safetensors"]


def test_text_is_not_written_for_a_disk_that_is_too_small(tmp_path, llama, monkeypatch):
    from fp4convert.calibration import samples

    monkeypatch.setattr(samples, "filled_on_demand", None)
    have_free(monkeypatch, 10**5)
    error = calibrate(llama, tmp_path / "c.safetensors", "--self-generate", SAMPLES)
    assert (error.code, error.json["error"]["code"]) == (5, "disk-full")
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_left_counts_as_there(tmp_path, llama, words, monkeypatch):
    from fp4convert.calibration import run

    class Death(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Death

    joined = run.join_parts
    monkeypatch.setattr(run, "join_parts", die)
    with pytest.raises(Death):
        calibrate(llama, tmp_path / "c.safetensors", "--text", words, "--gram", "full")
    monkeypatch.setattr(run, "join_parts", joined)
    have_free(monkeypatch, STATISTICS + STATES // 3)
    assert calibrate(llama, tmp_path / "c.safetensors", "--text", words, "--gram", "full").code == 0


def test_gram_matrices_that_memory_does_not_hold(tmp_path, llama, words, monkeypatch):
    monkeypatch.setattr(workdir, "memory_nbytes", lambda: MATRICES - 1)
    error = calibrate(llama, tmp_path / "c.safetensors", "--text", words, "--gram", "full")
    assert (error.code, error.json["error"]["code"]) == (2, "gram-memory")
    assert f"{MATRICES:,} bytes of memory" in error.json["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
    assert (
        calibrate(llama, tmp_path / "c.safetensors", "--text", words, "--gram", "block:32").code
        == 0
    )


def test_folders_that_are_missing_are_made_and_go_with_an_error(tmp_path, llama, words):
    output = tmp_path / "sub" / "missing" / "c.safetensors"
    words.write_text("a")
    assert calibrate(llama, output, "--text", words).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
    words.write_text(TEXT)
    assert calibrate(llama, output, "--text", words).code == 0
    assert [path.name for path in output.parent.iterdir()] == ["c.safetensors"]


def test_a_place_that_cannot_be(tmp_path, words):
    folder = make_model(tmp_path / "m", "Llama")
    before = sorted(folder.iterdir())
    inside = calibrate(folder, folder / "c.safetensors", "--text", words)
    assert (inside.code, inside.json["error"]["code"]) == (2, "output-in-source")
    assert sorted(folder.iterdir()) == before
    (tmp_path / "d").mkdir()
    directory = calibrate(folder, tmp_path / "d", "--text", words, "--force")
    assert (directory.code, directory.json["error"]["code"]) == (5, "output-exists")
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.slow
def test_an_error_that_would_come_again_leaves_nothing_of_an_earlier_run(
    tmp_path, words, monkeypatch
):
    from safetensors.torch import save_file

    folder = make_model(tmp_path / "m", "Llama")
    tensors = read_tensors(folder)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    state = tmp_path / ".c.safetensors.calibration"
    with start("calibrate", folder, "-o", tmp_path / "c.safetensors", "--text", words) as process:
        while not (state / "part-00000.json").exists() and process.poll() is None:
            time.sleep(0.001)
        process.kill()
    assert (
        calibrate(folder, tmp_path / "c.safetensors", "--text", words).json["error"]["code"]
        == "calibration-nan"
    )
    assert not state.exists()


@pytest.mark.slow
def test_a_stop_says_what_stays(tmp_path, llama, words):
    state = tmp_path / ".c.safetensors.calibration"
    arguments = ("calibrate", llama, "-o", tmp_path / "c.safetensors", "--text", words)
    with start(*arguments) as process:
        while not (state / "part-00000.json").exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    if process.returncode != 0:  # it was faster
        assert process.returncode == 143
        assert f"error[interrupted]: interrupted: finished layers are kept in {state}\n" in said
        assert f"next: Continue with: fp4convert {' '.join(map(str, arguments))}" in said
        assert "shards" not in said
    assert run(*arguments).code == 0


@pytest.mark.parametrize("held_nbytes", [10**9, 0])
def test_progress_is_told_while_the_model_writes(tmp_path, llama, held_nbytes):
    from fp4convert.calibration.run import Run, calibrate
    from fp4convert.calibration.samples import Feed

    said: list[tuple[str, str]] = []
    seconds = iter(range(10**6))
    phases = Phases(lambda line, tensor: said.append((line, tensor)), lambda: float(next(seconds)))
    feed = Feed(self_generate=3, sequence_length=8)
    calibrate(
        Run(open_source(str(llama)), tmp_path / "c", feed, held_nbytes=held_nbytes, phases=phases)
    )
    written = [(line, tensor) for line, tensor in said if line.startswith("write: ")]
    assert written[-1][0].startswith("write: 21 tokens in ")  # 3 times 8, but for the first ones
    assert any(
        "of 21 tokens (" in line and "tokens/s" in line and line.endswith(" left")
        for line, _ in written[:-1]
    )
    assert any(tensor.startswith("token ") and tensor.endswith(" of 8") for _, tensor in written)
    if not held_nbytes:
        assert any(tensor.startswith("model.layers.") for _, tensor in written[len(written) // 2 :])
