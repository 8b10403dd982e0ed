"""Folds of a checkpoint on the Hub: readers lie anywhere in any shard, and the result is that of
the folder.
"""

from __future__ import annotations

import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import FIRST, SECOND, Tensor, bf16, run, write_checkpoint
from folded_llama import LAYER, READERS
from folding_llama import LLAMA, bf16_norm
from made_up_inputs import correlated

from fp4convert.storage.open import open_source

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2048}
SHAPES = {
    **{"mlp.down_proj": (2048, 3072), "self_attn.o_proj": (2048, 2048)},
    **{f"mlp.{leaf}_proj": (3072, 2048) for leaf in ("gate", "up")},
    **{f"self_attn.{leaf}_proj": (1024, 2048) for leaf in "vk"},
    "self_attn.q_proj": (2048, 2048),
}


def shards() -> dict[str, dict[str, Tensor]]:
    """Norms first, and their readers behind more than a piece of the stream,
    or in the other shard.
    """
    norms: dict[str, Tensor] = {
        f"{LAYER}.{name}.weight": bf16_norm(2048) for name in READERS if "layernorm" in name
    }
    matrices: dict[str, Tensor] = {
        f"{LAYER}.{name}.weight": ("BF16", shape, bf16(*shape, seed=seed))
        for seed, (name, shape) in enumerate(SHAPES.items())
    }
    names = list(matrices)
    return {
        FIRST: norms | {name: matrices[name] for name in names[::2]},
        SECOND: {name: matrices[name] for name in names[1::2]},
    }


@pytest.mark.slow
def test_a_folded_model_from_the_hub_is_the_folders(hub, tmp_path):
    made = write_checkpoint(tmp_path / "made", shards(), {**LLAMA, **SIZES})
    hub.add("org/model", made)
    tensors = {}
    for maker, readers in READERS.items():
        x = correlated(SHAPES[readers[0]][1], 64, len(maker))
        tensors |= {
            name: array
            for reader in readers
            for name, array in statistics_of(f"{LAYER}.{reader}", x).items()
        }
    statistics = write_calibration(tmp_path / "c.safetensors", open_source(str(made)), tensors)
    digests = []
    for source in (made, "org/model"):
        out = tmp_path / f"out-{len(digests)}"
        words = ("--format", "nvfp4", "--method", "awq", "--calibration", statistics)
        memory = () if source is made else ("--memory", "0.1")
        outcome = run("quantize", source, *words, *memory, "-o", out, "-q", "--workers", "2")
        assert outcome.code == 0, outcome.err
        digests.append({path.name: path.read_bytes() for path in out.glob("*.safetensors")})
    assert digests[0] == digests[1]
    verified = run("verify", tmp_path / "out-1", "--source", "org/model", "--json")
    assert [one["code"] for one in verified.json["findings"]] == ["class-unknown"]
