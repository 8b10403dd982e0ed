"""Which experts stay: by hand-typed saliencies, for routers of every kind."""

import numpy as np
import pytest

from fp4convert.conversion.experts import (
    Routing,
    choose_kept,
    find_mixtures,
    kept_columns,
    kept_rows,
    read_routing,
)
from fp4convert.errors import InputError
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.recipes.rules import ExpertsRule
from fp4convert.storage.safetensors import TensorRef

RULE = ExpertsRule(("n_routed_experts", "num_experts"), ("num_experts_per_tok",), ())
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


@pytest.mark.parametrize(
    ("saliency", "routing", "kept"),
    [
        ([3, 1, 2, 4], Routing(4, 3, 2), (0, 2, 3)),
        ([3, 1, 2, 4], Routing(4, 2, 2), (0, 3)),
        ([1, 1, 1, 1], Routing(4, 3, 2), (0, 1, 2)),  # of equals the first
        ([0, 2, 0, 2], Routing(4, 3, 2), (0, 1, 3)),
        ([0, 0, 0, 5], Routing(4, 1, 1), (3,)),
        ([9, 8, 7, 6, 1, 2, 3, 4], Routing(8, 4, 2), (0, 1, 2, 3)),
        ([9, 8, 7, 6, 1, 2, 3, 4], Routing(8, 4, 2, 2, 1, 2), (0, 1, 6, 7)),  # two of each group
        ([9, 8, 7, 6, 1, 2, 3, 4], Routing(8, 4, 2, 4, 2), (0, 2, 5, 7)),
    ],
)
def test_the_lowest_go(saliency, routing, kept):
    assert choose_kept(saliency, routing) == kept


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, Routing(128, 96, 8)),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            Routing(256, 96, 8, 8, 4, 2),
        ),
        (
            {"text_config": {"num_experts": 128, "num_experts_per_tok": 8, "n_group": 1}},
            Routing(128, 96, 8),
        ),
        (
            {
                "n_routed_experts": 160,
                "num_experts_per_tok": 6,
                "n_group": 8,
                "topk_group": 3,
                "topk_method": "group_limited_greedy",
            },
            Routing(160, 96, 6, 8, 3, 1),
        ),
        (
            {
                "n_routed_experts": 160,
                "num_experts": 160,
                "num_experts_per_tok": 6,
                "n_group": None,
            },
            Routing(160, 96, 6),
        ),
    ],
)
def test_what_config_json_says_of_routing(config, expected):
    assert read_routing(config, RULE, 96) == expected


@pytest.mark.parametrize(
    ("config", "keep", "words"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, 0, ("--keep 0", "a number from 2 to 7")),
        ({"num_experts": 8, "num_experts_per_tok": 2}, -3, ("--keep -3", "a number from 2 to 7")),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 8, ("--keep 8", "8 experts")),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 1, ("sent to 2 experts", "--keep 2")),
        ({"num_experts": 4, "num_experts_per_tok": 4}, 3, ("needs 4 to choose 4", "Leave prune")),
        (GROUPS, 8, ("--keep 8", "a multiple of 2 from 4 to 6")),
        (GROUPS, 1, ("sent to 2 experts", "--keep 4")),
        (GROUPS, 5, ("2 groups", "--keep 4 or 6")),
        (GROUPS, 2, ("each of 2 groups would keep 1 of its experts", "--keep 4")),
        (
            {**GROUPS, "n_routed_experts": 16, "num_experts_per_tok": 4},
            6,
            ("each of 2 groups would keep 3 of its experts", "sent to 4", "--keep 8"),
        ),
        (
            {**GROUPS, "n_routed_experts": 16, "num_experts_per_tok": 4},
            5,
            ("need equal numbers of experts", "multiple of 2: --keep 8"),
        ),
        (
            {**GROUPS, "n_group": 3},
            6,
            ("8 experts do not divide into 3 equal groups", "correct its n_group"),
        ),
        (
            {"num_experts": 8, "n_routed_experts": 16, "num_experts_per_tok": 2},
            4,
            ("n_routed_experts 16", "num_experts 8"),
        ),
        (
            {"num_experts": [64, 64], "num_experts_per_tok": 2},
            4,
            ("num_experts [64, 64]", "one positive integer"),
        ),
        ({"num_experts": True, "num_experts_per_tok": 2}, 4, ("num_experts True",)),
        ({"num_experts": 8}, 4, ("nothing under num_experts_per_tok",)),
        ({}, 4, ("nothing under n_routed_experts or num_experts",)),
    ],
)
def test_numbers_that_the_router_cannot_work_with(config, keep, words):
    with pytest.raises(InputError) as caught:
        read_routing(config, RULE, keep)
    told = f"{caught.value.message} {caught.value.next_step}"
    assert all(word in told for word in words), told
    assert caught.value.next_step


def test_group_by_the_best_alone_may_have_one_expert_left():
    assert (
        read_routing(
            {**GROUPS, "topk_method": "group_limited_greedy", "topk_group": 2}, RULE, 2
        ).keep
        == 2
    )


def bytes_of(parts, data: bytes) -> bytes:
    return b"".join(data[part.start : part.start + part.nbytes] for part in parts)


@pytest.mark.parametrize("kept", [(0, 2, 3), (1,), (0, 1, 2, 3, 4), (4,), (0, 4)])
def test_parts_of_tensors_are_what_numpy_indexes(kept):
    table = np.arange(10 * 3 * 2, dtype=np.uint16).reshape(10, 3, 2)
    data = b"head" + table.tobytes()
    flat = kept_rows(
        TensorRef("flat", "U16", (10, 6), "f", 4), kept, 5
    )  # two rows for each of five experts
    assert bytes_of(flat, data) == table.reshape(5, -1)[list(kept)].tobytes()
    stack = kept_rows(TensorRef("stack", "BF16", (5, 2, 3, 2), "f", 4), kept, 5)
    assert bytes_of(stack, data) == table.reshape(5, -1)[list(kept)].tobytes()
    columns = kept_columns(TensorRef("columns", "F16", (12, 5), "f", 4), kept, 5)
    assert (
        bytes_of(columns, data)
        == np.ascontiguousarray(table.reshape(12, 5)[:, list(kept)]).tobytes()
    )
    assert sum(part.elements for part in stack) == len(kept) * 12


def refs(**shapes: tuple[int, ...]) -> list[TensorRef]:
    return [
        TensorRef(name.replace("__", "."), "BF16", shape, "model.safetensors", 0)
        for name, shape in shapes.items()
    ]


def test_what_belongs_to_a_mixture():
    recipe = build_recipe(Target("nvfp4"), {"model_type": "deepseek_v3"})
    found = find_mixtures(
        refs(
            m__0__mlp__up_proj__weight=(4, 4),
            m__1__mlp__gate__weight=(2, 4),
            m__1__mlp__gate__e_score_correction_bias=(2,),
            m__1__mlp__shared_experts__up_proj__weight=(4, 4),
            m__1__mlp__experts__0__up_proj__weight=(4, 4),
            m__1__mlp__experts__1__up_proj__weight=(4, 4),
            m__1__mlp__experts__1__up_proj__weight_scale_inv=(1, 1),
        ),
        recipe,
    )
    (mixture,) = found
    assert mixture.name == "m.1.mlp"
    assert [(number, rest) for _, number, rest in mixture.singles] == [
        (0, ".up_proj.weight"),
        (1, ".up_proj.weight"),
        (1, ".up_proj.weight_scale_inv"),
    ]
    assert [ref.name for ref in mixture.rows] == [
        "m.1.mlp.gate.weight",
        "m.1.mlp.gate.e_score_correction_bias",
    ]


@pytest.mark.parametrize(
    ("config", "names", "words"),
    [
        ({"model_type": "llama"}, ["m.mlp.up_proj.weight"], "no layer with experts"),
        ({"model_type": "deepseek_v3"}, ["m.mlp.up_proj.weight"], "no layer with experts"),
        (
            {"model_type": "strange"},
            ["m.mlp.experts.0.up_proj.weight"],
            "no recipe says where this model has its router",
        ),
        (
            {"model_type": "deepseek_v3"},
            ["m.mlp.experts.all_of_them"],
            "no recipe says which part of m.mlp.experts.all_of_them",
        ),
    ],
)
def test_models_whose_experts_nobody_tells(config, names, words):
    with pytest.raises(InputError, match=words) as caught:
        find_mixtures(
            refs(**{name.replace(".", "__"): (2, 2) for name in names}),
            build_recipe(Target("nvfp4"), config),
        )
    assert caught.value.next_step


def test_a_recipe_of_ones_own_tells_them(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[experts]]\ncounts = ["n"]\nchosen = ["k"]\nrows = ["*.route"]\ncolumns = ["*.bias"]\n'
    )
    recipe = build_recipe(
        Target("nvfp4"), {"model_type": "strange"}, RecipeOptions(recipe=str(path))
    )
    tensors = refs(
        m__experts__0__up__weight=(4, 4),
        m__experts__1__up__weight=(4, 4),
        m__route=(2, 4),
        m__bias=(1, 2),
    )
    (mixture,) = find_mixtures(tensors, recipe)
    assert ([ref.name for ref in mixture.rows], [ref.name for ref in mixture.columns]) == (
        ["m.route"],
        ["m.bias"],
    )
