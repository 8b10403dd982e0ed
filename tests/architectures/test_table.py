"""The committed table of architectures is what the packages' own classes say."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import zlib
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from paths import ROOT

FOLDER = ROOT / "configs" / "architectures"
LIMIT = 400_000  # bytes of the wheel
QUICK = ("LlamaForCausalLM", "GptOssForCausalLM", "ModernBertForMaskedLM")
OTHERS = (
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "CLIPModel",
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma4ForConditionalGeneration",
    "GraniteMoeHybridForCausalLM",
    "GraniteSpeechForConditionalGeneration",
    "Lfm2MoeForCausalLM",
    "Llama4ForConditionalGeneration",
    "MambaForCausalLM",
    "NllbMoeForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "Wav2Vec2ForCTC",
    "WhisperForConditionalGeneration",
)
KEPT = (
    *("type", "base", "tied", "ties", "tied_inside", "counts", "defaults"),
    *("skip", "absent", "unexpected"),
)


@cache
def index() -> dict[str, Any]:
    """What says where the line of a class is."""
    return json.loads((FOLDER / "index.json").read_text(encoding="ascii"))


def line_of(source: str, family: str) -> dict[str, Any]:
    """The line of a family, read as the package reads it."""
    offset, length, at = index()["families"][source][family]
    with (FOLDER / f"{source}.zlib").open("rb") as file:
        file.seek(offset)
        return json.loads(zlib.decompress(file.read(length)).splitlines()[at])


def written(name: str) -> dict[str, Any]:
    """What the table says of a class of transformers, with names for numbers."""
    line = line_of("transformers", index()["classes"]["transformers"][name])
    blocks = [[line["parts"][number] for number in accumulate(gaps)] for gaps in line["blocks"]]

    def named(layout: dict[str, list[int]]) -> dict[str, list[list[str]]]:
        return {prefix: sorted(blocks[each] for each in kinds) for prefix, kinds in layout.items()}

    row = line["classes"][name]
    return {key: row[key] for key in KEPT if key in row} | {
        "layout": named(row["layout"]),
        "flips": [[path, value, named(change)] for path, value, change in row.get("flips", ())],
        "ends": {
            prefix: [[place, has, blocks[parts], *inner] for place, has, parts, *inner in ends]
            for prefix, ends in row.get("ends", {}).items()
        },
        "words": {
            path: {
                prefix: {word: blocks[parts] for word, parts in telling.items()}
                for prefix, telling in lists.items()
            }
            for path, lists in row.get("words", {}).items()
        },
        "renamings": [line["renamings"][number] for number in row.get("renamings", ())],
    }


def built(name: str) -> dict[str, Any]:
    """What the builder makes of the class that is installed here."""
    import transformers

    folder = str(ROOT / "tests" / "architectures")
    if folder not in sys.path:
        sys.path.append(folder)
    from of_transformers import rows

    made_by = getattr(transformers, name)
    (row,) = rows((made_by.config_class, [made_by]))
    assert "error" not in row, row
    kept = {key: row[key] for key in KEPT if row[key] not in ([], {}, "")}
    return kept | {key: row[key] for key in ("layout", "flips", "ends", "words", "renamings")}


@pytest.fixture
def same_version() -> None:
    """Skip where another transformers is installed than the table was made of."""
    wanted = index()["sources"]["transformers"]["version"]
    found = importlib.metadata.version("transformers")
    if wanted != found:
        pytest.skip(f"the table is of transformers {wanted}, {found} is installed")


@pytest.mark.usefixtures("same_version")
@pytest.mark.parametrize("name", QUICK)
def test_classes_are_what_the_table_says(name: str) -> None:
    assert json.loads(json.dumps(built(name))) == written(name)


@pytest.mark.slow
@pytest.mark.usefixtures("same_version")
@pytest.mark.parametrize("name", OTHERS)
def test_more_classes_are_what_the_table_says(name: str) -> None:
    assert json.loads(json.dumps(built(name))) == written(name)


def test_index_leads_to_every_class() -> None:
    for source, classes in index()["classes"].items():
        lines = {family: line_of(source, family) for family in index()["families"][source]}
        assert {line["family"] for line in lines.values()} == lines.keys()
        found = {name: family for family, line in lines.items() for name in line["classes"]}
        assert found == classes
    assert index()["types"]["llama"] == "LlamaForCausalLM"
    assert set(index()["types"].values()) <= index()["classes"]["transformers"].keys()


def test_table_is_small_in_the_wheel() -> None:
    packed = [zlib.compress(file.read_bytes(), 6) for file in FOLDER.iterdir()]
    assert sum(map(len, packed)) <= LIMIT


def test_known_facts() -> None:
    """Facts read in the classes by hand: which way experts lie, what is tied, what is renamed."""
    llama4 = written("Llama4ForConditionalGeneration")["layout"]["language_model.model.layers.#."]
    stacks = {part for kind in llama4 for part in kind if "experts" in part}
    assert {"Y3 feed_forward.experts.gate_up_proj", "Y3 feed_forward.experts.down_proj"} <= stacks
    qwen = written("Qwen3MoeForCausalLM")["layout"]["model.layers.#."]
    assert any("X3 mlp.experts.gate_up_proj" in kind for kind in qwen)
    assert any("L2 mlp.gate_proj.weight" in kind for kind in qwen)  # mlp_only_layers
    t5 = written("T5ForConditionalGeneration")
    assert t5["counts"] == {
        "encoder.block.#.": "num_layers",
        "decoder.block.#.": "num_decoder_layers",
    }
    assert t5["defaults"]["num_decoder_layers"] == ["num_layers"]
    bias = "E2 SelfAttention.relative_attention_bias.weight"
    assert t5["ends"]["encoder.block.#.layer.#."] == [[0, True, [bias], 0]]
    kinds = written("Qwen3NextForCausalLM")["words"]["layer_types"]["model.layers.#."]
    assert kinds.keys() == {"full_attention", "linear_attention"}
    assert "L2 self_attn.q_proj.weight" in kinds["full_attention"]
    gpt2 = written("GPT2LMHeadModel")
    assert gpt2["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "T2 attn.c_attn.weight" in gpt2["layout"]["transformer.h.#."][0]
    (lora,) = (each for each in written("DeepseekV3ForCausalLM")["flips"] if "q_lora" in each[0])
    assert lora[1] is False
    assert all("L2 self_attn.q_proj.weight" in kind for kind in lora[2]["model.layers.#."])
