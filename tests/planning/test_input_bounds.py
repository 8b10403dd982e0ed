"""Input scales without data: bounds by norms and weights.

Expected figures are computed here, by hand or by torch, from the weights that the test writes: 2688
is 6 * 448, and 0.09375 is 6 * 2**-6, the least block that a scale of 1 rounds well.
"""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, bf16, read_folder, run, values_of, weight, write_single
from folding_llama import LLAMA, TENSORS
from input_scales import input_scales

from fp4convert.storage.local import LocalSource

LAYER = "model.layers.0"
INNER, POST = f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
WORDS = ("--format", "nvfp4", "--activations", 4, "--dialect", "modelopt")
D, INTERMEDIATE, EXPERTS = 64, 160, 20


def quantized(source: object, out: Path, *options: object) -> tuple[dict[str, float], list[str]]:
    """The input scales of an artifact, and the warnings about them."""
    done = run("quantize", source, *WORDS, "-o", out, "--json", *options)
    assert done.code == 0, done
    warnings = [one for one in done.json["warnings"] if "input scale" in one]
    return input_scales(out, "modelopt"), warnings


def floats(values: np.ndarray) -> Tensor:
    return "F32", values.shape, np.asarray(values, "<f4").tobytes()


def vector(size: int, seed: int, mean: float = 1.0) -> Tensor:
    return floats(mean + 0.3 * np.random.default_rng(seed).standard_normal(size))


def matrices(shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {
        f"{name}.weight": weight(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())
    }


def gated(parent: str, names: tuple[str, str, str]) -> dict[str, tuple[int, int]]:
    shapes = ((INTERMEDIATE, D), (INTERMEDIATE, D), (D, INTERMEDIATE))
    return {f"{parent}.{name}": shape for name, shape in zip(names, shapes, strict=True)}


QKVO = {f"{ATTENTION}.{leaf}_proj": (D, D) for leaf in "qkvo"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": D}
USUAL = gated(MLP, ("gate_proj", "up_proj", "down_proj"))
OF_EXPERTS = [f"{LAYER}.block_sparse_moe.experts.{number}" for number in range(EXPERTS)]
PHI = {f"{ATTENTION}.{leaf}": (D, D) for leaf in ("q_proj", "k_proj", "v_proj", "dense")}
FC = {f"{MLP}.fc1": (INTERMEDIATE, D), f"{MLP}.fc2": (D, INTERMEDIATE)}
RELU = """about = "fc1, ReLU, fc2"
[[fold]]
into = "{layer}.input_layernorm"
kind = "norm"
linears = ["{layer}.mlp.fc1"]
[[fold]]
into = "{layer}.mlp.fc1"
kind = "linear"
linears = ["{layer}.mlp.fc2"]
"""


def norms(*names: str, mean: float = 1.0, has_bias: bool = False) -> dict[str, Tensor]:
    found = {f"{name}.weight": vector(D, len(name), mean) for name in names}
    return found | {f"{name}.bias": vector(D, 7 + len(name)) for name in names if has_bias}


def biases(shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {f"{name}.bias": vector(rows, len(name)) for name, (rows, _) in shapes.items()}


MODELS: dict[str, tuple[str, dict[str, Tensor]]] = {
    "llama": ("llama", norms(INNER, POST) | matrices(QKVO | USUAL)),
    "gemma": ("gemma", norms(INNER, POST, mean=0.0) | matrices(QKVO | USUAL)),
    "mixture": (
        "mixtral",
        norms(INNER, POST)
        | matrices(
            QKVO
            | {f"{LAYER}.block_sparse_moe.gate": (EXPERTS, D)}
            | {k: v for one in OF_EXPERTS for k, v in gated(one, ("w1", "w3", "w2")).items()}
        ),
    ),
    "layernorm": ("phi", norms(INNER, has_bias=True) | matrices(PHI | FC) | biases(PHI | FC)),
    "relu": ("unheard", norms(INNER, has_bias=True) | matrices(FC) | biases(FC)),
}


def as_source(name: str, folder: Path) -> Path:
    kind, tensors = MODELS[name]
    return write_single(folder, tensors, {**HEADS, "model_type": kind, "num_hidden_layers": 1})


def inputs_by_torch(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """What every linear layer is given for residual vectors: q_proj stands for its siblings."""
    import torch
    from torch.nn import functional

    t = {key: torch.tensor(values_of(value)) for key, value in MODELS[name][1].items()}
    x = torch.tensor(x)

    def norm(at: str) -> torch.Tensor:
        w = t[f"{at}.weight"] + (1.0 if name == "gemma" else 0.0)
        if f"{at}.bias" in t:
            return functional.layer_norm(x, (D,), w, t[f"{at}.bias"], 1e-12)
        return functional.rms_norm(x, (D,), w, 1e-12)

    def linear(at: str, given: torch.Tensor) -> torch.Tensor:
        return functional.linear(given, t[f"{at}.weight"], t.get(f"{at}.bias"))

    first, found = norm(INNER), {}
    if f"{ATTENTION}.q_proj.weight" in t:
        found[f"{ATTENTION}.q_proj"] = first
        q, k, v = (linear(f"{ATTENTION}.{leaf}_proj", first).reshape(-1, 4, 16) for leaf in "qkv")
        turned = (one.transpose(0, 1) for one in (q, k, v))
        mixed = functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(0, 1)
        out = "dense" if name == "layernorm" else "o_proj"
        found[f"{ATTENTION}.{out}"] = mixed.reshape(-1, D)
    if f"{MLP}.fc1.weight" in t:
        found[f"{MLP}.fc1"] = first
        found[f"{MLP}.fc2"] = functional.relu(linear(f"{MLP}.fc1", first))
        return {key: value.numpy() for key, value in found.items()}
    gates = [(one, "w1", "w3", "w2") for one in OF_EXPERTS] if name == "mixture" else []
    second, act = norm(POST), functional.gelu if name == "gemma" else functional.silu
    for parent, gate, up, down in gates or [(MLP, "gate_proj", "up_proj", "down_proj")]:
        found[f"{parent}.{gate}"] = found[f"{parent}.{up}"] = second
        g, u = (linear(f"{parent}.{leaf}", second) for leaf in (gate, up))
        found[f"{parent}.{down}"] = act(g) * u
    return {key: value.numpy() for key, value in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_real_inputs_never_exceed_the_bound_and_typical_blocks_keep_their_bits(name, tmp_path):
    """Inputs of one large channel, of rows of the weights, and normal ones."""
    source, options = as_source(name, tmp_path / "source"), ()
    if name == "relu":
        (tmp_path / "relu.toml").write_text(RELU)
        options = ("--recipe", tmp_path / "relu.toml")
    found, warnings = quantized(source, tmp_path / "out", *options)
    unknown = {f"{MLP}.fc2"} if name == "layernorm" else set()
    assert {module for module, one in found.items() if one == 1} == unknown
    assert [f"1 module in four bits, the first {MLP}.fc2, is 1" in one for one in warnings] == [
        True for _ in unknown
    ]
    rows = [values_of(one) for one in MODELS[name][1].values() if one[1][1:] == (D,)]
    chance = np.random.default_rng(3)
    normal = chance.standard_normal((256, D))
    hostile = np.concatenate([normal, 1e4 * np.eye(D), *rows[:8], normal**9])
    seen, usual = inputs_by_torch(name, hostile), inputs_by_torch(name, normal)
    assert seen.keys() - {"lm_head"} <= found.keys()
    for module in seen.keys() - unknown:
        scale, largest = found[module], np.abs(seen[module]).max()
        assert largest <= 2688 * scale <= 3000 * largest, module
        blocks = np.abs(usual[module]).reshape(len(normal), -1, 16).max(axis=2)
        assert np.median(blocks) >= 4 * 0.09375 * scale, module


def test_figures_by_hand(tmp_path):
    """Of 160 rows 0, 32, 80 and 112 begin a strip of 16: a quarter of ten strips each."""
    found, _ = quantized(as_source("llama", tmp_path / "source"), tmp_path / "out")
    t = {name.removesuffix(".weight"): values_of(one) for name, one in MODELS["llama"][1].items()}
    assert found[f"{ATTENTION}.q_proj"] == np.float32(8 * np.abs(t[INNER]).max() / 2688)
    of_v = np.sqrt(((t[f"{ATTENTION}.v_proj"] * t[INNER]) ** 2).sum(axis=1))
    assert found[f"{ATTENTION}.o_proj"] == pytest.approx(4 * 8 * of_v.max() / 2688, rel=1e-6)
    rows = [first + row for first in (0, 32, 80, 112) for row in range(16)]
    gate, up = (
        np.sqrt(((t[f"{MLP}.{leaf}_proj"] * t[POST]) ** 2).sum(axis=1))[rows]
        for leaf in ("gate", "up")
    )
    expected = 4 * D * (gate * up).max() / 2688
    assert found[f"{MLP}.down_proj"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("power", [-9, 8])
@pytest.mark.parametrize("is_passed_on", [True, False])
def test_scales_follow_powers_of_two(is_passed_on, power, tmp_path):
    """The same function with other magnitudes: scales follow exactly, and codes stay. Where v and
    up pass them on to o and down, members of a scale group differ, and o and down have their codes.
    """
    c, passing = 2.0**power, [f"{ATTENTION}.v_proj", f"{MLP}.up_proj"] if is_passed_on else []
    last, tensors = [f"{ATTENTION}.o_proj", f"{MLP}.down_proj"], {}
    for name, (dtype, shape, _) in TENSORS.items():
        stem, values = name.removesuffix(".weight"), values_of(TENSORS[name])
        if stem in (INNER, POST):
            values = values * c
        elif stem not in (passing if is_passed_on else last):
            values = values / c
        wide = np.asarray(values, np.float32).view(np.uint32) >> 16
        tensors[name] = (dtype, shape, wide.astype("<u2").tobytes())
    plain, _ = quantized(write_single(tmp_path / "plain", TENSORS, LLAMA), tmp_path / "a")
    found, warnings = quantized(write_single(tmp_path / "moved", tensors, LLAMA), tmp_path / "b")
    assert (len(found), warnings) == (7, [])
    stays = [] if is_passed_on else last
    assert found == {one: scale * (1 if one in stays else c) for one, scale in plain.items()}
    before, after = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    for module in last if is_passed_on else found:
        for end in (".weight", ".weight_scale"):
            assert before[module + end] == after[module + end], module + end


def test_a_scale_reaches_less_far_where_typical_blocks_would_lose_bits(tmp_path):
    """A norm of ones, but for one of a million: a block of 16 columns of unit variance has an amax
    of 16^(1/4) = 2, which stays eight times above the floor.
    """
    huge = np.ones(D)
    huge[5] = 1e6
    tensors = TENSORS | {f"{INNER}.weight": floats(huge)}
    found, _ = quantized(write_single(tmp_path / "source", tensors, LLAMA), tmp_path / "out")
    assert found[f"{ATTENTION}.q_proj"] == np.float32(2 / (8 * 0.09375))


@pytest.mark.parametrize(
    ("absent", "stranger", "unknown"),
    [
        (INNER, "", [f"{ATTENTION}.{leaf}_proj" for leaf in "qkvo"]),
        (POST, "", [f"{MLP}.{leaf}_proj" for leaf in ("gate", "up", "down")]),
        ("", "side_proj", [f"{LAYER}.side_proj", f"{ATTENTION}.o_proj", f"{MLP}.down_proj"]),
    ],
)
def test_unknown_structure_keeps_1_and_the_warning(absent, stranger, unknown, tmp_path):
    """Without its norm nothing is known of what reads it; beside a matrix that no rule names the
    readers of norms alone are.
    """
    tensors = {name: one for name, one in TENSORS.items() if name != f"{absent}.weight"}
    tensors |= {f"{LAYER}.{stranger}.weight": weight(9)} if stranger else {}
    found, (warning,) = quantized(write_single(tmp_path / "a", tensors, LLAMA), tmp_path / "out")
    assert {module for module, one in found.items() if one == 1} == set(unknown)
    assert f"of {len(unknown)} modules in four bits, the first {LAYER}." in warning


@pytest.mark.parametrize("is_read", [True, False])
def test_a_sibling_of_the_same_shape_is_a_gate_of_the_same_norm_or_unknown(is_read, tmp_path):
    tensors = MODELS["relu"][1] | {f"{MLP}.fc3.weight": weight(5, INTERMEDIATE)}
    text = RELU.replace('["{layer}.mlp.fc1"]', '["{layer}.mlp.fc1", "{layer}.mlp.fc3"]', is_read)
    text += "" if is_read else 'aside = ["{layer}.mlp.fc3"]\n'
    (tmp_path / "own.toml").write_text(text)
    source = write_single(tmp_path / "a", tensors, {**HEADS, "model_type": "unheard"})
    found, _ = quantized(source, tmp_path / "out", "--recipe", tmp_path / "own.toml")
    assert (found[f"{MLP}.fc2"] == 1, found[f"{MLP}.fc1"] == 1) == (not is_read, False)


def test_fp8_weights_are_decoded_and_eight_bit_modules_have_their_range(tmp_path):
    """A v of codes of 1 under the scale 2 has rows of 2: |2 w| by hand."""
    one = (D, D)
    fp8 = {
        f"{ATTENTION}.v_proj.weight": ("F8_E4M3", one, bytes([0x38]) * D * D),
        f"{ATTENTION}.v_proj.weight_scale": ("F32", (), np.float32(2).tobytes()),
    }
    tensors = MODELS["llama"][1] | fp8
    record = {"quant_method": "modelopt", "quant_algo": "FP8"}
    config = {**HEADS, "model_type": "llama", "quantization_config": record}
    source = write_single(tmp_path / "source", tensors, config)
    found, warnings = quantized(source, tmp_path / "out", "--keep-packed")
    of_v = 2 * np.linalg.norm(values_of(tensors[f"{INNER}.weight"]))
    assert (found[f"{ATTENTION}.o_proj"], warnings) == (
        pytest.approx(4 * 8 * of_v / 2688, rel=1e-6),
        [],
    )
    words = ("--format", "fp8", "--activations", 8, "--dialect", "modelopt", "--json")
    done = run("quantize", as_source("llama", tmp_path / "b"), *words, "-o", tmp_path / "fp8")
    assert not [one for one in done.json["warnings"] if "input scale" in one]
    eight = input_scales(tmp_path / "fp8", "modelopt")
    largest = np.abs(values_of(MODELS["llama"][1][f"{INNER}.weight"])).max()
    assert eight[f"{ATTENTION}.q_proj"] == np.float32(8 * largest / 448)


def test_experts_share_the_largest_bound_and_a_plan_reads_little(tmp_path, monkeypatch):
    """Of 20 experts 16 are read, and of each some rows; expert 5 is one of them."""
    kind, tensors = MODELS["mixture"]
    large = values_of(tensors[f"{OF_EXPERTS[5]}.w3.weight"]) * 4
    tensors = tensors | {f"{OF_EXPERTS[5]}.w3.weight": floats(large)}
    source = write_single(tmp_path / "source", tensors, {**HEADS, "model_type": kind})
    nbytes = []
    read = LocalSource.read_range

    def count(self, ref, start, stop):
        nbytes.append(stop - start)
        return read(self, ref, start, stop)

    monkeypatch.setattr(LocalSource, "read_range", count)
    plan = run("quantize", source, *WORDS, "--dry-run", "--json")
    assert plan.code == 0
    experts = sum(len(data) for name, (_, _, data) in tensors.items() if ".experts." in name)
    assert 0 < sum(nbytes) < experts / 3
    found, _ = quantized(source, tmp_path / "out")
    plain, _ = quantized(as_source("mixture", tmp_path / "plain"), tmp_path / "b")
    (of_all,) = {found[f"{one}.w2"] for one in OF_EXPERTS}
    (before,) = {plain[f"{one}.w2"] for one in OF_EXPERTS}
    assert of_all >= before


def test_the_same_scales_from_a_hub_and_by_reproduce(hub, tmp_path):
    source = as_source("mixture", tmp_path / "source")
    found, _ = quantized(source, tmp_path / "out")
    hub.add("org/model", source)
    assert quantized("org/model", tmp_path / "far") == (found, [])
    again = run("reproduce", tmp_path / "out", "--source", source, "--json")
    assert again.json["reproduced"] is True, again


def test_a_source_without_numbers_says_nothing(tmp_path):
    """Norms of zeros bound nothing: 1, with the warning."""
    tensors = TENSORS | {f"{INNER}.weight": ("BF16", (D,), bytes(2 * D))}
    found, (warning,) = quantized(write_single(tmp_path / "a", tensors, LLAMA), tmp_path / "out")
    assert "of 4 modules in four bits" in warning
    assert found[f"{ATTENTION}.o_proj"] == 1
    assert bf16(1) != bytes(2)
