"""What is not as an artifact's record says is made into nothing else."""

import pytest
from checkpoints import FIRST, done, run, write_llama
from rewriting import forget_hashes

COMMANDS = {
    "dequantize": (),
    "transcode": ("--dialect", "modelopt"),
    "quantize": ("--format", "nvfp4"),
}


@pytest.fixture
def made(tmp_path):
    source = write_llama(tmp_path / "m")
    (source / "tokenizer.json").write_text("{}")
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flipped_bit_is_refused(command, made, tmp_path):
    out, data = tmp_path / "out", bytearray((made / FIRST).read_bytes())
    data[-1] ^= 2
    (made / FIRST).write_bytes(data)
    outcome = run(command, made, *COMMANDS[command], "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], out.exists()) == (2, "unsound-artifact", False)
    assert f"hash-mismatch: {FIRST}" in error["message"]
    forget_hashes(made)
    done(command, made, *COMMANDS[command], "-o", out)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_refused_and_an_edited_one_is_not(command, made, tmp_path):
    out = tmp_path / "out"
    (made / "tokenizer.json").unlink()
    outcome = run(command, made, *COMMANDS[command], "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], out.exists()) == (2, "unsound-artifact", False)
    assert "file-missing: tokenizer.json" in error["message"]
    (made / "tokenizer.json").write_text('{"edited": 1}')
    done(command, made, *COMMANDS[command], "-o", out)
