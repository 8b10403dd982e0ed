"""A layer at a time agrees with the whole model: transformers in one piece, hooks and formulas of
this file.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from calibrations import token_amax
from safetensors.numpy import load_file
from tiny_chains import LENGTH, MODELS, SAMPLES, TEXT, make_model, tokens_of

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.storage.open import open_source

pytestmark = pytest.mark.engine
RTOL = 1e-5
WORDS = ["abcd", "hello", "xyzxyz", "quitealongsentence", "ab"]


def calibrated(
    folder: Path, output: Path, text: str = TEXT, gram: str = "full"
) -> dict[str, np.ndarray]:
    """What a calibration of that model says, every linear layer's own; one that another holds has
    the same arrays.
    """
    from fp4convert.calibration.run import Run, calibrate
    from fp4convert.calibration.samples import Feed

    words = output.with_suffix(".txt")
    words.write_text(text)
    calibrate(Run(open_source(str(folder)), output, Feed((words,), sequence_length=LENGTH), gram))
    found = load_file(output)
    for module, holder in open_calibration(output).inputs.items():
        prefix = f"{holder}."
        found |= {
            f"{module}.{name[len(prefix) :]}": array
            for name, array in found.items()
            if name.startswith(prefix)
        }
    return found


def whole_model(folder: Path, is_encoder: bool = False):
    import transformers

    kind = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    return kind.from_pretrained(
        folder, dtype="float32", attn_implementation="eager", experts_implementation="eager"
    ).eval()


def run_whole(
    model, samples: list[list[int]], is_encoder: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, list], list[dict[str, float]]]:
    """(inputs of linear layers, calls of experts, largest |key| and |value| in the cache by layer),
    everything in one piece.
    """
    import torch
    from transformers import DynamicCache

    inputs, calls, cached = defaultdict(list), defaultdict(list), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, name=name: inputs[name].append(args[0].reshape(-1, m.in_features))
            )
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda m, args, name=name: calls[name].append((m, args))
            )
    for ids in samples:
        with torch.no_grad():
            cache = None if is_encoder else DynamicCache()
            out = model(input_ids=torch.tensor([ids]), use_cache=True, past_key_values=cache)
        cached += [] if is_encoder else [out.past_key_values]
    largest = []
    for layer in range(model.config.num_hidden_layers if cached else 0):
        kept = [cache.layers[layer] for cache in cached]
        pairs = [(each.keys.abs().max().item(), each.values.abs().max().item()) for each in kept]
        largest.append(dict(zip("kv", np.max(pairs, 0), strict=True)))
    given = {n: torch.cat(parts).numpy().astype(np.float64) for n, parts in inputs.items()}
    return given, calls, largest


def assert_statistics(found: dict[str, np.ndarray], module: str, x: np.ndarray) -> None:
    """What is said of a module is what the definitions make of its inputs."""
    expected = {
        "input_amax": np.abs(x).max(),
        "input_sq_mean": (x * x).mean(0),
        "input_abs_mean": np.abs(x).mean(0),
        "input_channel_amax": np.abs(x).max(0),
        "input_token_amax": token_amax(x),
        "input_gram": (x.T @ x / len(x))[None],
    }
    for kind, value in expected.items():
        got = found[f"{module}.{kind}"]
        assert got.shape == np.shape(value)
        assert np.abs(got - value).max() <= RTOL * np.abs(value).max(), f"{module}.{kind}"
    assert found[f"{module}.tokens"] == len(x)


def samples_of(text: str) -> list[list[int]]:
    return [tokens_of(text[start : start + LENGTH]) for start in range(0, len(text), LENGTH)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_at_a_time_agrees_with_the_whole_model(tmp_path, name):
    folder = make_model(tmp_path / name, name)
    found = calibrated(folder, tmp_path / "c.safetensors")
    model = whole_model(folder)
    inputs, calls, largest = run_whole(model, samples_of(TEXT))
    assert len(samples_of(TEXT)) == SAMPLES
    checked = {module for module in inputs if f"{module}.tokens" in found}
    assert checked == set(inputs)
    for module in checked:
        assert_statistics(found, module, inputs[module])
    for layer, pair in enumerate(largest if name != "DeepseekV3" else ()):
        for kind, amax in pair.items():
            np.testing.assert_allclose(
                found[f"model.layers.{layer}.self_attn.{kind}_amax"], amax, rtol=RTOL
            )
    # latent attention caches neither
    assert any(kind.endswith("k_amax") for kind in found) == (name != "DeepseekV3")
    for path, made in calls.items():
        check_experts(found, path, made)
    assert (len(calls) > 0) == (name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"))


def check_experts(found: dict[str, np.ndarray], path: str, calls: list) -> None:
    """Experts one by one, by the definitions: gate and up of each token, the router's weight times
    the norm of the output.
    """
    import torch

    module = calls[0][0]
    is_mixtral, is_gptoss = "Mixtral" in type(module).__name__, "GptOss" in type(module).__name__
    stored = path.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else path
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    unrouted = [
        expert
        for expert in range(4)
        if sum((args[1] == expert).sum().item() for _, args in calls) < 48 / 2
    ]
    for expert in range(4):
        given, between, norms = [], [], []
        for _, (hidden, chosen, weights) in calls:
            token, rank = torch.where(chosen == expert)
            x = hidden[token]
            if is_gptoss:
                both = x @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
                g, u = both[:, 0::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
                h = (u + 1) * g * torch.sigmoid(1.702 * g)
                y = h @ module.down_proj[expert] + module.down_proj_bias[expert]
            else:
                g, u = (x @ module.gate_up_proj[expert].T).chunk(2, -1)
                h = torch.nn.functional.silu(g) * u
                y = h @ module.down_proj[expert].T
            given.append(x)
            between.append(h)
            norms.append(weights[token, rank] * y.norm(dim=-1))
        count, norm = sum(map(len, norms)), torch.cat(norms).double()
        moe = stored.removesuffix(".experts")
        assert found[f"{moe}.expert_tokens"][expert] == count
        np.testing.assert_allclose(
            found[f"{moe}.expert_saliency"][expert], norm.mean().item() if count else 0, rtol=RTOL
        )
        if expert not in unrouted:
            for module_name, parts in ((gate, given), (up, given), (down, between)):
                x = torch.cat(parts).detach().numpy().astype(np.float64)
                assert_statistics(found, f"{stored}.{expert}.{module_name}", x)


def test_an_encoder_is_given_lines_without_padding(tmp_path):
    folder = make_model(tmp_path / "bert", "Bert")
    found = calibrated(folder, tmp_path / "c.safetensors", "\n".join(WORDS))
    inputs, _, _ = run_whole(
        whole_model(folder, is_encoder=True), [tokens_of(word) for word in WORDS], True
    )
    assert {f"{module}.tokens" for module in inputs} <= found.keys()
    for module, x in inputs.items():
        assert_statistics(found, module, x)
    assert not any(name.endswith("k_amax") for name in found)


@pytest.mark.parametrize("is_looking", [True, False])
def test_a_watch_that_looks_at_nothing_keeps_nothing(is_looking, tmp_path):
    import torch

    from fp4convert.calibration.model import open_skeleton
    from fp4convert.calibration.observers import Watch, watching

    folder = make_model(tmp_path / "m", "Mixtral")
    skeleton = open_skeleton(open_source(str(folder)), folder, torch.device("cpu"))
    skeleton.fill("")
    watch = Watch(skeleton, "none", skeleton.seats, is_looking=is_looking)
    with watching(watch):
        made = skeleton.model(input_ids=torch.tensor([tokens_of(TEXT[:LENGTH])])).logits
    assert torch.isfinite(made).all()
    assert (bool(watch.moments), bool(watch.routed), bool(watch.cached)) == (is_looking,) * 3
