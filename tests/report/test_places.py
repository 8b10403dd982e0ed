"""Where tensors stand, by names of models that people publish; every place is typed by hand."""

from hashlib import sha256

import pytest

from fp4convert.report.places import Place, find_places, group_names, reading_order

LETTERS = str.maketrans("0123456789", "ghijklmnop")
LLAMA = [
    f"model.layers.{layer}.{module}.weight"
    for layer in (0, 1)
    for module in ("self_attn.q_proj", "mlp.up_proj")
]
UNET = "down_blocks.1.attentions.0"
CASES = {
    "a decoder": (
        [*LLAMA, "lm_head.weight"],
        {
            "model.layers.1.mlp.up_proj.weight": Place("model.layers", (1,), "mlp.up_proj"),
            "lm_head.weight": Place("", (), "lm_head"),
        },
    ),
    "experts": (
        [
            *(
                f"model.layers.3.mlp.experts.{expert}.{leaf}.weight"
                for expert in range(4)
                for leaf in ("gate_proj", "up_proj")
            ),
            "model.layers.3.mlp.shared_experts.up_proj.weight",
        ],
        {
            "model.layers.3.mlp.experts.2.up_proj.weight": Place(
                "model.layers", (3,), "mlp.experts.*.up_proj", 2
            ),
            "model.layers.3.mlp.shared_experts.up_proj.weight": Place(
                "model.layers", (3,), "mlp.shared_experts.up_proj"
            ),
        },
    ),
    "experts with their numbers last": (
        [f"blocks.7.ffn.experts.w1.{expert}.weight" for expert in range(3)],
        {"blocks.7.ffn.experts.w1.2.weight": Place("blocks", (7,), "ffn.experts.w1.*", 2)},
    ),
    "a pipeline's numbers behind modules": (
        [
            *(
                f"blocks.{n}.{leaf}.weight"
                for n in (0, 1)
                for leaf in ("ffn.0", "ffn.2", "ffn.net.0.proj", "attn1.to_out.0")
            )
        ],
        {
            "blocks.1.ffn.2.weight": Place("blocks", (1,), "ffn.2"),
            "blocks.1.ffn.net.0.proj.weight": Place("blocks", (1,), "ffn.net.0.proj"),
            "blocks.1.attn1.to_out.0.weight": Place("blocks", (1,), "attn1.to_out.0"),
        },
    ),
    "layers within layers": (
        [
            *(
                f"{UNET}.transformer_blocks.{n}.attn1.{leaf}.weight"
                for n in (0, 1)
                for leaf in ("to_q", "to_k")
            ),
            f"{UNET}.proj_in.weight",
        ],
        {
            f"{UNET}.transformer_blocks.1.attn1.to_q.weight": Place(
                "down_blocks.*.attentions.*.transformer_blocks", (1, 0, 1), "attn1.to_q"
            ),
            f"{UNET}.proj_in.weight": Place("down_blocks.*.attentions", (1, 0), "proj_in"),
        },
    ),
    "one tensor in each layer": (
        ["h.0.mlp.weight", "h.1.mlp.weight"],
        {"h.1.mlp.weight": Place("h", (1,), "mlp")},
    ),
    "numbers in words and leading zeros are none": (
        ["layer.w1.weight", "layer.007.x.weight"],
        {
            "layer.w1.weight": Place("", (), "layer.w1"),
            "layer.007.x.weight": Place("", (), "layer.007.x"),
        },
    ),
    "words that begin and end as separators do": (
        ["_a_.0.__b__.weight"],
        {"_a_.0.__b__.weight": Place("_a_", (0,), "__b__")},
    ),
    "a name that is only a number": (["0"], {"0": Place("", (0,), "")}),
    "an empty name": ([""], {"": Place("", (), "")}),
}


@pytest.mark.parametrize("case", CASES)
def test_places(case):
    names, expected = CASES[case]
    found = dict(zip(names, find_places(names), strict=True))
    assert {name: found[name] for name in expected} == expected


def test_modules_stand_in_the_order_in_which_people_say_them():
    said = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    said += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert reading_order(sorted(said)) == said


def names_of(layers, experts):
    leaves = ("gate_proj", "up_proj", "down_proj")
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}.weight"
        for layer in range(layers)
        for expert in range(experts)
        for leaf in leaves
    ]


def test_few_tensors_have_a_row_each():
    assert group_names(["a.0.x", "a.1.x"], 1000, 50) == [("a.0.x", [0]), ("a.1.x", [1])]


def test_experts_of_a_layer_share_a_row_before_layers_do():
    names = names_of(4, 8)
    groups = group_names([*names, "lm_head.weight"], 1500, 50)
    assert len(groups) == 4 * 3 + 1
    assert groups[0][0] == "model.layers.0.mlp.experts.*.gate_proj.weight (8 of them)"
    assert [names[at] for at in groups[0][1]] == names[:24:3]
    assert groups[-1] == ("lm_head.weight", [96])


@pytest.mark.parametrize("room", [50_000, 20_000, 4_000, 1_000])
def test_groups_fit_into_their_room(room):
    names = [*names_of(64, 16), *(f"odd{number}.w{number}" for number in range(5))]
    groups = group_names(names, room, 60)
    assert sum(len(label) + 60 for label, _ in groups) <= room
    assert sorted(at for _, group in groups for at in group) == list(range(len(names)))


@pytest.mark.parametrize("kind", ["{word}.proj.weight", "model.layers.{at}.mlp.{word}.weight"])
def test_names_that_have_nothing_in_common_fit_too(kind):
    words = [sha256(b"%d" % at).hexdigest().translate(LETTERS) for at in range(2_500)]
    names = [kind.format(at=at, word=word) for at, word in enumerate(words)]
    groups = group_names(names, 50_000, 60)
    places = find_places(names)
    shown = {places[group[0]].module for _, group in groups}
    assert sum(len(label) + 60 for label, _ in groups) + sum(map(len, shown)) <= 50_000
    assert [at for _, group in groups for at in group] == list(range(len(names)))
