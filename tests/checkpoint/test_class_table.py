"""The table of classes is read under a config.json: conditions of settings, tied parameters."""

import json
import zlib

import pytest

from fp4convert.checkpoint import class_table
from fp4convert.checkpoint.class_table import find_architecture
from fp4convert.checkpoint.explained import explain
from fp4convert.recipes.recipe import model_recipe

LAYER = ["L2 attn.weight", "L2 mlp.weight"]


def read_row(monkeypatch, folder, row, config):
    """The class Model of a table of one row, under a config."""
    parts = sorted({part for kinds in row["kinds"].values() for part in kinds})
    blocks = list(row["kinds"])
    numbers = [[parts.index(part) for part in sorted(kinds)] for kinds in row["kinds"].values()]
    gaps = [[b - a for a, b in zip((0, *one), one, strict=False)] for one in numbers]

    def packed(layout):
        return {prefix: [blocks.index(name) for name in names] for prefix, names in layout.items()}

    line = {
        "parts": parts,
        "blocks": gaps,
        "classes": {
            "Model": {
                **{key: row[key] for key in ("tied", "ties", "tied_inside") if key in row},
                "layout": packed(row["layout"]),
                "flips": [[*one, packed(change)] for *one, change in row.get("flips", ())],
            }
        },
    }
    data = zlib.compress(json.dumps(line).encode())
    place = {"transformers": {"model": [0, len(data), 0]}}
    index = {"classes": {"transformers": {"Model": "model"}}, "families": place}
    (folder / "configs" / "architectures").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "architectures" / "transformers.zlib").write_bytes(data)
    monkeypatch.setattr(class_table, "_read_index", lambda: index)
    monkeypatch.setattr(class_table, "files", lambda _: folder)
    sizes = {"size": 8, "width": 8, "heads": 2, "layers": 2, "rows": 2}
    return find_architecture({"architectures": ["Model"], **sizes, **config})


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, {"usual"}),
        ({"size": 4}, {"projected"}),  # != width
        ({"width": 4}, {"projected"}),
        ({"size": None}, {"usual"}),  # a setting without a number is compared with none
        ({"groups": 3}, {"grouped"}),
        ({"groups": 1}, {"usual"}),
        ({"words": ["a", "b"]}, {"grouped"}),
        ({"words": ["a"]}, {"usual"}),
        ({"bias": True}, {"biased"}),
        ({"gated": True}, {"gated"}),
        ({"bias": True, "gated": True}, {"both"}),  # not what the two say one by one
    ],
)
def test_conditions_of_settings(monkeypatch, tmp_path, config, kinds):
    blocks = {
        "usual": LAYER,
        "projected": [*LAYER, "L2 project.weight"],
        "grouped": [*LAYER, "L2 group.weight"],
        "biased": [*LAYER, "b1 mlp.bias"],
        "gated": ["L2 attn.weight", "L2 up.weight"],
        "both": ["L2 attn.weight", "L2 up.weight", "b1 up.bias"],
    }
    flips = [
        ["size", "!= width", {"h.#.": ["projected"]}],
        ["groups", "> 1", {"h.#.": ["grouped"]}],
        ["words", "b", {"h.#.": ["grouped"]}],
        ["bias", True, {"h.#.": ["biased"]}],
        ["gated", True, {"h.#.": ["gated"]}],
        [["bias", "gated"], [True, True], {"h.#.": ["both"]}],
    ]
    row = {"kinds": blocks, "layout": {"h.#.": ["usual"]}, "flips": flips}
    found = read_row(monkeypatch, tmp_path, row, config).kinds["h.#."]
    assert set(found) == {frozenset(part[3:] for part in blocks[kind]) for kind in kinds}


@pytest.mark.parametrize(
    ("config", "left_out", "lost"),
    [
        ({}, "h.1.shared.weight", set()),  # another layer has it
        ({}, "h.1.mlp.weight", {"h.1.mlp"}),
        ({"tie_word_embeddings": False}, "h.1.shared.weight", {"h.1.shared"}),
        ({}, "heads.", set()),  # a list, all of which is tied to another
        ({"tie_word_embeddings": False}, "heads.", {"heads"}),
        ({}, "text.head.weight", set()),  # the model inside ties by default
        ({"text": {"tie_word_embeddings": False}}, "text.head.weight", {"text.head"}),
    ],
)
def test_tied_parameters_may_be_absent(monkeypatch, tmp_path, config, left_out, lost):
    row = {
        "kinds": {
            "layer": [*LAYER, "L2 shared.weight"],
            "root": ["- h.#", "- heads.#", "- wte.#", "H2 text.head.weight", "E2 text.wte.weight"],
            "weight": ["L2 weight"],
        },
        "layout": {"": ["root"], "h.#.": ["layer"], "heads.#.": ["weight"], "wte.#.": ["weight"]},
        "tied": {
            "h.#.shared.weight": "h.#.shared.weight",
            "heads.#.weight": "wte.#.weight",
        },
        "ties": True,
        "tied_inside": {"text": [True, {"text.head.weight": "text.wte.weight"}]},
    }
    architecture = read_row(monkeypatch, tmp_path, row, config)
    names = ["text.head.weight", "text.wte.weight"]
    names += [f"{one}.{at}.weight" for one in ("heads", "wte") for at in range(2)]
    names += [f"h.{at}.{one}.weight" for at in range(2) for one in ("attn", "mlp", "shared")]
    kept = [name for name in names if not name.startswith(left_out)]
    found = explain(kept, architecture, model_recipe({}), {})
    assert {one.name for one in found.lost} == lost
    assert not found.unexplained
