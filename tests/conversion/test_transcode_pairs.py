"""Every dialect into another one that holds the same data, and back: artifacts are made by
spellings.py, read by safetensors.

What is read becomes canonical values and what is written comes of these (the round trips of
tests/checkpoint/test_dialects.py), so that a ring covers what all pairs would.
"""

import json
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, Tensor, done, read_folder, read_shard, run
from spellings import PLAIN, Module, module_of, spelled, tensors_of, write_artifact

NVFP4_DIALECTS = ("compressed-tensors", "modelopt", "quark", "comfy", *PLAIN)
MXFP4_DIALECTS = ("compressed-tensors", "quark", "mlx", *PLAIN)
SHAPES = {
    "model.layers.0.self_attn.o_proj": (144, 96),
    "model.layers.0.mlp.down_proj": (16, 64),
    "proj": (48, 160),
}
PARENT = "model.layers.0.mlp.experts"
GPT_OSS = {"gate_proj": (24, 64), "up_proj": (24, 64), "down_proj": (40, 96)}
DEEPSEEK = {"w1": (24, 64), "w3": (24, 64), "w2": (40, 96)}


def modules_of(
    fmt: str, activations: int = 16, multiplier: float | None = None
) -> dict[str, Module]:
    """Three matrices; the global scales of NVFP4 are powers of two,
    so that reciprocals come back.
    """
    made = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        own = (multiplier or 2.0 ** (seed - 12)) if fmt == "nvfp4" else None
        made[name] = module_of(
            seed, fmt, shape, own, 2.0**seed if own and activations == 4 else None
        )
    return made


def experts_of(members: dict[str, tuple[int, int]]) -> dict[str, Module]:
    shapes = {
        f"{PARENT}.{number}.{member}": shape
        for number in range(3)
        for member, shape in members.items()
    }
    return {
        name: module_of(seed, "mxfp4", shape, None)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def transcode(artifact: Path, output: Path, dialect: str) -> dict:
    name, _, layout = dialect.partition("/")
    options = ("--scale-layout", layout) if layout else ()
    return done(
        "transcode", artifact, "-o", output, "--dialect", name, *options, "--json", "-q"
    ).json


def restored(artifact: Path, output: Path) -> dict[str, Tensor]:
    done("dequantize", artifact, "-o", output, "--dtype", "fp32", "-q", "--device", "cpu")
    return read_folder(output)


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def check_pair(
    tmp_path: Path,
    pair: tuple[str, str],
    fmt: str,
    modules: dict[str, Module],
    activations: int = 16,
    is_split: bool = False,
) -> None:
    before, after = pair
    artifact = write_artifact(tmp_path / "a", before, fmt, modules, activations, is_split)
    there = transcode(artifact, tmp_path / "b", after)
    assert there["carried"] == {"modules": len(modules), "bit_for_bit": len(modules), "rounded": []}
    assert differences(read_folder(tmp_path / "b"), tensors_of(after, fmt, modules)) == []
    found = run("inspect", tmp_path / "b", "--json").json
    assert (found["findings"], found["dialect"], found["format"]) == (
        [],
        after.partition("/")[0],
        fmt,
    )
    assert (found["activations"], found["tensors"]["quantized"]) == (activations, len(modules))
    done("verify", tmp_path / "b")
    transcode(tmp_path / "b", tmp_path / "back", before)
    assert differences(read_folder(tmp_path / "back"), read_folder(artifact)) == []
    for folder in ("b", "back"):
        check_index(tmp_path / folder)
    if "gpt-oss" not in pair:
        assert restored(tmp_path / "b", tmp_path / "rb") == restored(artifact, tmp_path / "ra")


def check_index(folder: Path) -> None:
    """No shard is empty, none is written twice, and the index knows where everything is."""
    shards = {path.name: len(read_shard(path)) for path in folder.glob("*.safetensors")}
    assert all(shards.values()), shards
    if len(shards) > 1:
        assert Counter(json.loads((folder / INDEX).read_text())["weight_map"].values()) == shards


def ring(dialects: Sequence[str]) -> list[tuple[str, str]]:
    """Pair every dialect with the next one: each is read once and written once, there and back."""
    return list(zip(dialects, (*dialects[1:], dialects[0]), strict=True))


@pytest.mark.parametrize("pair", ring(NVFP4_DIALECTS), ids="-".join)
def test_nvfp4_there_and_back(pair, tmp_path):
    check_pair(tmp_path, pair, "nvfp4", modules_of("nvfp4"), is_split=True)


@pytest.mark.parametrize("pair", ring(NVFP4_DIALECTS), ids="-".join)
def test_nvfp4_with_four_bit_activations_there_and_back(pair, tmp_path):
    check_pair(tmp_path, pair, "nvfp4", modules_of("nvfp4", 4), activations=4)


@pytest.mark.parametrize("pair", ring(MXFP4_DIALECTS), ids="-".join)
def test_mxfp4_there_and_back(pair, tmp_path):
    is_split = MXFP4_DIALECTS.index(pair[0]) % 2 == 0  # in turn: two shards, a single file
    check_pair(tmp_path, pair, "mxfp4", modules_of("mxfp4"), is_split=is_split)


@pytest.mark.parametrize(
    "pair", ring([dialect for dialect in MXFP4_DIALECTS if dialect != "mlx"]), ids="-".join
)
def test_mxfp4_with_four_bit_activations_there_and_back(pair, tmp_path):
    check_pair(tmp_path, pair, "mxfp4", modules_of("mxfp4"), activations=4)


@pytest.mark.parametrize("other", MXFP4_DIALECTS)
def test_experts_there_and_back(other, tmp_path):
    """In turn: experts of gpt-oss in two shards, and of DeepSeek in a single file."""
    is_split = MXFP4_DIALECTS.index(other) % 2 == 0
    dialect, members = ("gpt-oss", GPT_OSS) if is_split else ("deepseek", DEEPSEEK)
    modules = experts_of(members)
    check_pair(tmp_path / "from", (dialect, other), "mxfp4", modules, is_split=is_split)
    check_pair(tmp_path / "to", (other, dialect), "mxfp4", modules, is_split=is_split)


@pytest.mark.parametrize("other", ["compressed-tensors", "modelopt", "plain/linear"])
def test_nvfp4_with_a_global_scale_of_one_to_and_from_mlx(other, tmp_path):
    modules = modules_of("nvfp4", multiplier=1.0)
    check_pair(tmp_path / "from", ("mlx", other), "nvfp4", modules)
    check_pair(tmp_path / "to", (other, "mlx"), "nvfp4", modules, is_split=True)


@pytest.mark.parametrize("other", ["modelopt", "quark", "comfy", "plain/linear"])
def test_a_scale_whose_reciprocal_does_not_come_back(other, tmp_path):
    """Named on the way, and the only tensor that is another one afterwards; between two multipliers
    nothing is rounded.
    """
    odd = next(
        x for x in np.linspace(1e-4, 2e-4, 99, dtype=np.float32) if 1 / (np.float32(1) / x) != x
    )
    modules = modules_of("nvfp4") | {"odd": module_of(9, "nvfp4", (16, 32), float(odd))}
    artifact = write_artifact(tmp_path / "a", other, "nvfp4", modules)
    there = transcode(artifact, tmp_path / "b", "compressed-tensors")
    assert there["carried"] == {"modules": 4, "bit_for_bit": 3, "rounded": ["odd"]}
    stored = read_folder(tmp_path / "b")["odd.weight_global_scale"][2]
    assert stored == struct.pack("<f", np.float32(1) / odd)
    transcode(tmp_path / "b", tmp_path / "back", other)
    names = spelled(other, "nvfp4", "odd", modules["odd"])
    (scale,) = {name for name in names if name.endswith(("global_scale", "weight_scale_2"))}
    assert differences(read_folder(tmp_path / "back"), read_folder(artifact)) == [scale]
    same = transcode(artifact, tmp_path / "c", "quark" if other == "modelopt" else "modelopt")
    assert same["carried"] == {"modules": 4, "bit_for_bit": 4, "rounded": []}
