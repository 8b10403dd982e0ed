"""A pattern stands for its names, all of them and no other."""

import random
import re
from itertools import product

import pytest

from fp4convert.checkpoint.module_names import (
    find_ranges,
    join_names,
    join_words,
    split_leaf,
    split_numbers,
)


def joined(*names: str) -> list[str]:
    return [pattern for pattern, _ in join_names((name, None) for name in names)]


def names_of(pattern: str) -> set[str]:
    """Every name of a pattern, by the rules that the documentation states and by no code of the
    package.
    """
    parts = re.split(r"(\[[0-9,-]+\]|\{[^}]*\})", pattern)
    choices = []
    for part in parts:
        if part.startswith("{"):
            choices.append(part[1:-1].split(","))
        elif part.startswith("["):
            ends = [[int(end) for end in run.split("-")] for run in part[1:-1].split(",")]
            choices.append([str(number) for run in ends for number in range(run[0], run[-1] + 1)])
        else:
            choices.append([part])
    return {"".join(words) for words in product(*choices)}


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], ["a.[0-2].b"]),
        (["a.0.b", "a.1.b", "a.2.b", "a.5.b", "a.6.b", "a.9.b"], ["a.[0-2,5-6,9].b"]),
        (["a.10.b", "a.9.b", "a.11.b"], ["a.[9-11].b"]),  # numbers, not their digits
        (["a.7.b"], ["a.7.b"]),
        (["m.0.q_proj", "m.0.k_proj", "m.0.v_proj"], ["m.0.{q,k,v}_proj"]),
        (
            ["m.0.w1", "m.0.w3", "m.1.w1", "m.1.w3"],
            ["m.[0-1].{w1,w3}"],
        ),  # a digit inside a word is no number
        (["m.0.q_proj.bias", "m.0.k_proj.bias"], ["m.0.{q,k}_proj.bias"]),
        (["m.0.v_proj", "m.0.o_proj", "m.0.k_proj", "m.0.q_proj"], ["m.0.{q,k,v,o}_proj"]),
        (["m.0.up_proj", "m.0.down_proj", "m.0.gate_proj"], ["m.0.{gate,up,down}_proj"]),
        (
            ["m.0.kv_b_proj", "m.0.q_a_proj", "m.0.o_proj", "m.0.q_b_proj"],
            ["m.0.{q_a,q_b,kv_b,o}_proj"],
        ),
        (
            ["m.0.add_v_proj", "m.0.to_add_out", "m.0.add_q_proj"],
            ["m.0.{add_q_proj,add_v_proj,to_add_out}"],
        ),
        (
            ["m.to_out", "m.to_v", "m.to_q", "m.add_v", "m.to_k", "m.add_k"],
            ["m.{add_k,add_v,to_q,to_k,to_v,to_out}"],
        ),
        (
            ["m.0.out_proj", "m.0.in_proj_z", "m.0.in_proj_qkv"],
            ["m.0.{in_proj_qkv,in_proj_z,out_proj}"],
        ),
        (["m.0.wv", "m.0.wo", "m.0.wk", "m.0.wq"], ["m.0.{wq,wk,wv,wo}"]),
        (["m.0.fc2", "m.0.fc1", "m.0.act"], ["m.0.{act,fc1,fc2}"]),
        (["m.0.q.bias", "m.0.k.bias", "m.0.sinks"], ["m.0.{q,k}.bias", "m.0.sinks"]),
        (["m.0.e.a_bias", "m.0.e.b_bias", "m.0.r.bias"], ["m.0.e.{a,b}_bias", "m.0.r.bias"]),
        (["m.0.a", "m.1.a", "m.0.b"], ["m.[0-1].a", "m.0.b"]),  # b of layer 1 is not there
        (["m.block_0.a", "m.block_1.a"], ["m.block_[0-1].a"]),
        (["m.00.a", "m.1.a"], ["m.00.a", "m.1.a"]),  # 00 is no number that could be written again
        (["m.0", "m.1"], ["m.[0-1]"]),
        (["0", "1"], ["[0-1]"]),
        (["x"], ["x"]),
        ([""], [""]),
        (
            [f"l.{a}.e.{b}" for a in (0, 1, 2) for b in (0, 1)] + ["l.3.e.0"],
            ["l.[0-2].e.[0-1]", "l.3.e.0"],
        ),
        (
            [f"l.{a}.e.{b}.{c}" for a in (0, 1) for b in (0, 1) for c in (5, 7)],
            ["l.[0-1].e.[0-1].[5,7]"],
        ),
        (["m." + "9" * 5000], ["m." + "9" * 5000]),
    ],
)
def test_names_are_joined(names, patterns):
    assert joined(*names) == patterns


@pytest.mark.parametrize(
    ("words", "one"),
    [
        (["gate_proj"], "gate_proj"),
        (["gate_proj", "up_proj"], "{gate,up}_proj"),
        (["q_a_proj", "kv_a_proj_with_mqa"], "{q_a_proj,kv_a_proj_with_mqa}"),
        (["input_layernorm", "post_attention_layernorm"], "{input,post_attention}_layernorm"),
        (["attn_q", "attn_k"], "attn_{q,k}"),
        (["a", "a_b"], "{a,a_b}"),
        (["a_b_c", "a_d_c"], "a_{b,d}_c"),
        (["w1", "w3"], "{w1,w3}"),
    ],
)
def test_words_join(words, one):
    assert join_words(words) == one
    assert names_of(one) == set(words)


def test_only_equal_verdicts_stand_together():
    named = [
        ("m.0.gate_proj", 1),
        ("m.0.up_proj", 1),
        ("m.0.down_proj", 2),
        ("m.1.gate_proj", 2),
        ("m.1.up_proj", 2),
    ]
    assert dict(join_names(named)) == {
        "m.0.{gate,up}_proj": [0, 1],
        "m.0.down_proj": [2],
        "m.1.{gate,up}_proj": [3, 4],
    }


def test_names_that_are_there_twice_are_counted_twice():
    assert list(join_names([("a.0", None), ("a.1", None), ("a.0", None)])) == [
        ("a.[0-1]", [0, 2, 1])
    ]


def test_patterns_stand_for_their_names_and_no_others():
    chance = random.Random(7)
    for _ in range(300):
        names = []
        for _ in range(chance.randrange(1, 60)):
            module = (
                f"l.{chance.randrange(4)}.{chance.choice(['mlp', 'attn'])}.e.{chance.randrange(4)}"
            )
            names.append(f"{module}.{chance.choice('abc')}_proj{chance.choice(['', '', '.bias'])}")
        verdicts = {name: chance.random() < 0.8 for name in names}
        named = list(verdicts.items())
        seen = []
        for pattern, positions in join_names(named):
            own = [named[position][0] for position in positions]
            assert names_of(pattern) == set(own)
            assert len(own) == len(set(own))
            assert len({verdicts[name] for name in own}) == 1
            seen += own
        assert sorted(seen) == sorted(verdicts)


def test_the_first_position_has_the_lowest_numbers():
    ((_, positions),) = join_names((f"a.{number}.b", None) for number in (10, 9, 2))
    assert positions == [2, 1, 0]


def test_ranges_and_parts_of_names():
    assert find_ranges([(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]) == [((0, 1), (1, 2)), ((2,), (1,))]
    assert split_numbers("a.3.b_7.w1") == (("a.", ".b_", ".w1"), (3, 7))
    assert split_leaf("a.b.c") == ("a.b.", "c", "")
    assert split_leaf("a.[0-1].{q,k}_proj.bias") == ("a.[0-1].", "{q,k}_proj", ".bias")
    named = {
        "bias": ("", "bias", ""),
        ".bias": ("", "", ".bias"),
        "q.bias": ("", "q", ".bias"),
        "": ("", "", ""),
    }
    assert {name: split_leaf(name) for name in named} == named
    assert split_leaf("a.experts.down_proj_bias") == ("a.experts.", "down_proj_bias", "")
