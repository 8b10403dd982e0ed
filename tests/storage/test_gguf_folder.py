"""A GGUF file read as a folder: what llama.cpp's converter adds is taken away, and names that
nobody knows are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import run

from fp4convert.errors import InputError
from fp4convert.storage.gguf_folder import FAMILIES
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access

CONFIG = {
    "model_type": "gemma2",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}
NORM = np.float32([0.5, -0.25, 1.5, 0.0] * 16)
NORMS = {
    "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
    "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
}


def write(folder: Path, **more: np.ndarray) -> tuple[Path, Path]:
    """A GGUF file with norms of Gemma, as GemmaModel.modify_tensors writes them: 1 + weight."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "gemma2")
    writer.add_block_count(1)
    for name in NORMS:
        writer.add_tensor(f"{name}.weight", NORM + 1)
    for name, array in more.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = folder / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    (config / "tokenizer.json").write_text("{}")
    return folder / "m.gguf", config


def test_what_is_added_to_norms_is_taken_away(tmp_path: Path) -> None:
    path, config = write(tmp_path, **{"rope_freqs.weight": np.ones(8, np.float32)})
    source = open_source(str(path), Access(config=config))
    refs = {ref.name: ref for ref in source.checkpoint.tensors}
    assert set(refs) == {f"{name}.weight" for name in NORMS.values()}
    for ref in refs.values():
        assert np.array_equal(np.frombuffer(source.read(ref), np.float32), NORM)
        assert source.read_range(ref, 4, 12).tobytes() == NORM[1:3].tobytes()
        buffer = bytearray(8)
        source.read_into(ref, 4, memoryview(buffer))
        assert bytes(buffer) == NORM[1:3].tobytes()
    assert "tokenizer.json" in source.checkpoint.sidecars
    assert source.checkpoint.config == CONFIG


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("rope_freqs.weight", np.ones(8, np.float32), "no rope_scaling"),
        ("blk.0.attn_q_norm.weight", np.ones(8, np.float16), "is F16; expected F32"),
    ],
)
def test_what_config_does_not_tell_and_odd_norms_are_refused(
    tmp_path: Path, name: str, array: np.ndarray, said: str
) -> None:
    path, config = write(tmp_path, **{name: array})
    text = json.dumps({key: value for key, value in CONFIG.items() if key != "rope_scaling"})
    (config / "config.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        open_source(str(path), Access(config=config))
    assert (caught.value.code, caught.value.tensor) == ("gguf-config", name)


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path, config = write(tmp_path, **{"blk.0.attn_sinks.weight": np.ones(2, np.float32)})
    with pytest.raises(InputError) as caught:
        open_source(str(path), Access(config=config))
    assert (caught.value.code, caught.value.tensor) == ("gguf-config", "blk.0.attn_sinks.weight")
    outcome = run("inspect", path, "--config", config, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "gguf-config")


@pytest.mark.parametrize("word", FAMILIES)
def test_names_are_the_inverse_of_llama_cpps_own_map(word: str) -> None:
    family = FAMILIES[word]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[family.architecture], 1)
    experts = {stem: module.replace(".{}", "") for stem, module in family.experts.items()}
    for stem, module in {**family.inner, **experts}.items():
        theirs = names.get_name(f"model.layers.0.{module}")
        # the map has what the architecture has
        assert theirs in (None, f"blk.0.{stem}"), module
    known = {"attn_q": "self_attn.q_proj", "attn_norm": "input_layernorm"}
    for stem, module in known.items():
        assert names.get_name(f"model.layers.0.{module}") == f"blk.0.{stem}"
