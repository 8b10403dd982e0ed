"""Pruned checkpoints, judged by transformers: the logits of the original, whose routers cannot
choose the dropped experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import write_calibration
from families import FAMILIES
from families_experts import LATENT
from family import Family, build, load, logits, logits_of
from tiny_chains import LENGTH, TEXT, make_model, tokens_of, write_tokenizer
from tiny_models import fp4convert, fp4convert_json, read_json, read_tensors

from fp4convert.storage.open import open_source

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]

KEPT = ((0, 2, 3), (0, 1, 3))  # of four, in even and in odd layers
ALWAYS = (
    "mixtral",
    "qwen3_moe",
    "ernie4_5_moe",
    "gpt_oss",
    "dbrx",
)  # all kinds of storage; the others when there is time
BIASES = ("e_score_correction_bias", "expert_bias")
MIXTURES = {  # by family: where its experts are, and in which layers
    "mixtral": ("model.layers.{}.block_sparse_moe", 0, 1),
    "qwen2_moe": ("model.layers.{}.mlp", 0, 1),
    "qwen3_moe": ("model.layers.{}.mlp", 0, 1),
    "deepseek_v2": ("model.layers.{}.mlp", 1),
    "deepseek_v3": ("model.layers.{}.mlp", 1),
    "kimi_k2": ("model.layers.{}.mlp", 1),
    "glm4_moe": ("model.layers.{}.mlp", 1),
    "glm4_moe_lite": ("model.layers.{}.mlp", 1),
    "minimax_m2": ("model.layers.{}.block_sparse_moe", 0, 1),
    "afmoe": ("model.layers.{}.mlp", 1),
    "ernie4_5_moe": ("model.layers.{}.mlp", 1),
    "lfm2_moe": ("model.layers.{}.feed_forward", 1),
    "qwen3_next": ("model.layers.{}.mlp", 0, 1),
    "qwen3_5_moe": ("model.language_model.layers.{}.mlp", 0, 1),
    "qwen3_vl_moe": ("model.language_model.layers.{}.mlp", 0, 1),
    "qwen3_vl_moe-saved": ("model.language_model.layers.{}.mlp", 0, 1),
    "llama4": ("language_model.model.layers.{}.feed_forward", 1),
    "gpt_oss": ("model.layers.{}.mlp", 0, 1),
    "gemma4-moe": ("model.language_model.layers.{}", 0, 1),
    "granitemoehybrid": ("model.layers.{}.block_sparse_moe", 0, 1),
    "dbrx": ("transformer.blocks.{}.ffn", 0, 1),
}

MOE = "model.layers.3.mlp"
DEEPSEEK = Family(
    "deepseek_v3-256",
    "DeepseekV3ForCausalLM",
    {
        **{
            **LATENT,
            "num_hidden_layers": 3,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 16,
        },
        **{"n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1},
    },
    (),
    extra={
        **{
            "model.layers.3.eh_proj.weight": (64, 128),
            "model.layers.3.shared_head.norm.weight": (64,),
        },
        **{f"{MOE}.gate.weight": (256, 64), f"{MOE}.gate.e_score_correction_bias": (256,)},
        **{
            f"{MOE}.experts.{expert}.{leaf}_proj.weight": (16, 64)
            for expert in range(256)
            for leaf in ("gate", "up")
        },
        **{f"{MOE}.experts.{expert}.down_proj.weight": (64, 16) for expert in range(256)},
    },
    beside="model.layers.3.",
)


def saliency_for(kept: Sequence[int], experts: int) -> np.ndarray:
    """Numbers by which those experts stay."""
    found = np.random.default_rng(experts).random(experts).astype(np.float32)
    found[list(kept)] += 1
    return found


def calibrated(source: Path, file: Path, kept: Mapping[str, Sequence[int]], experts: int) -> Path:
    """A calibration file by which those experts of each mixture stay;
    it has no other statistics.
    """
    statistics: dict[str, np.ndarray] = {}
    for mixture, stay in kept.items():
        statistics[f"{mixture}.expert_saliency"] = saliency_for(stay, experts)
        statistics[f"{mixture}.expert_tokens"] = np.full(experts, 1000, np.int64)
    return write_calibration(file, open_source(str(source)), statistics)


@contextmanager
def masked(model: Any, kept: Mapping[int, Sequence[int]], experts: int) -> Iterator[Any]:
    """The model, whose router in each of those layers gives every expert that goes the score of
    minus infinity.
    """
    import torch

    current: list[int] = []
    real = torch.nn.functional.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        scores = real(x, weight, bias)
        if current and len(weight) == experts:
            scores[..., current] = -torch.inf
        return scores

    handles, count = [], 0
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        dropped = sorted(set(range(experts)) - set(kept.get(int(layer[1]), ()))) if layer else []
        weight = getattr(module, "weight", None)
        if (
            weight is not None
            and weight.dim() == 2
            and len(weight) == experts
            and re.search(r"\b(gate|router)\b", name)
        ):
            count += 1
            handles.append(
                module.register_forward_pre_hook(lambda *_, own=dropped: current.extend(own))
            )
            handles.append(module.register_forward_hook(lambda *_: current.clear()))
        for kind, bias in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if kind in BIASES and layer:
                bias.data[..., dropped] = -torch.inf
    assert count == len(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        yield model
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "family",
    [
        family if family.name in ALWAYS else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
        if family.name in MIXTURES
    ],
    ids=str,
)
def test_the_result_computes_what_the_model_does_that_may_not_choose_the_others(
    family: Family, tmp_path: Path
) -> None:
    source, out = build(family, tmp_path / "source"), tmp_path / "out"
    named, *layers = MIXTURES[family.name]
    kept = {layer: KEPT[layer % 2] for layer in layers}
    file = calibrated(
        source,
        tmp_path / "calibration",
        {named.format(layer): stay for layer, stay in kept.items()},
        4,
    )
    fp4convert("prune", source, "-o", out, "--calibration", file, "--keep", 3, "-q")
    dtype = "float64" if family.name == "dbrx" else "bfloat16"
    with masked(load(family, source, dtype), kept, 4) as model:
        expected = logits_of(family, model)
    found = logits(family, out, dtype=dtype)
    if (
        family.name == "dbrx"
    ):  # a linear layer with three rows adds in another order than one with four
        assert (found - expected).abs().max() < 1e-12
    else:
        assert found.equal(expected)
    assert (logits(family, source, dtype=dtype) - expected).abs().max() > 0.01


@pytest.mark.slow
def test_256_experts_become_160_in_groups_and_quantize_takes_the_result(tmp_path: Path) -> None:
    """DeepSeek V3's names and routing; the layer for multi-token prediction, which transformers
    does not run, is left out.
    """
    source, out = build(DEEPSEEK, tmp_path / "source"), tmp_path / "out"
    random = np.random.default_rng(0)
    kept = {
        layer: [
            32 * group + int(expert)
            for group in range(8)
            for expert in np.sort(random.permutation(32)[:20])
        ]
        for layer in (1, 2)
    }
    file = calibrated(
        source,
        tmp_path / "calibration",
        {f"model.layers.{layer}.mlp": stay for layer, stay in kept.items()},
        256,
    )
    document = fp4convert_json("prune", source, "-o", out, "--calibration", file, "--keep", 160)
    assert document["experts"] == {"before": 256, "kept": 160, "layers": 2}
    config = read_json(out / "config.json")
    assert (config["n_routed_experts"], config["num_nextn_predict_layers"]) == (160, 0)
    assert read_json(out / "expert_pruning.json")["kept"] == {
        f"model.layers.{layer}.mlp": stay for layer, stay in kept.items()
    }
    assert not any(name.startswith("model.layers.3.") for name in read_tensors(out))
    with masked(load(DEEPSEEK, source), kept, 256) as model:
        expected = logits_of(DEEPSEEK, model)
    found = logits(DEEPSEEK, out)
    assert found.equal(expected)
    assert (logits(DEEPSEEK, source) - expected).abs().max() > 0.01

    fp4convert(
        "quantize", out, "--format", "nvfp4", "--scale-rule", "amax", "-o", tmp_path / "four", "-q"
    )
    fp4convert("dequantize", tmp_path / "four", "-o", tmp_path / "restored", "-q")
    restored = logits(DEEPSEEK, tmp_path / "restored")
    noise = (restored - found).float()
    assert 0 < noise.pow(2).mean() < 0.1 * found.float().pow(2).mean()


@pytest.mark.slow
def test_glm_5_is_calibrated_pruned_quantized_and_evaluated(tmp_path: Path) -> None:
    """256 experts become 160 by a calibration of its own text; KL as whole models have it."""
    import torch

    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0}
    (glm,) = (family for family in FAMILIES if family.name == "glm_moe_dsa")
    glm = replace(glm, config={**glm.config, **experts}, extra=None)
    folders = [tmp_path / name for name in ("source", "pruned", "four", "restored")]
    source, pruned, four, restored = folders
    write_tokenizer(build(glm, source))
    (text := tmp_path / "text.txt").write_text(TEXT)
    read = ("--text", text, "--sequence-length", LENGTH)
    file = tmp_path / "calibration.safetensors"
    fp4convert("calibrate", source, "-o", file, *read)
    document = fp4convert_json("prune", source, "-o", pruned, "--calibration", file, "--keep", 160)
    assert document["experts"] == {"before": 256, "kept": 160, "layers": 1}
    fp4convert("quantize", pruned, "--format", "nvfp4", "-o", four, "-q")
    fp4convert("dequantize", four, "-o", restored, "--dtype", "fp32", "-q")
    found = fp4convert_json("evaluate", four, "--source", pruned, *read)

    ids = torch.tensor(tokens_of(TEXT)).reshape(-1, LENGTH)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.no_grad():
        p, q = (
            load(glm, folder, dtype="float32", **eager)(input_ids=ids).logits[:, :-1].double()
            for folder in (pruned, restored)
        )
    ratios = p.log_softmax(-1) - q.log_softmax(-1)
    kl = (p.softmax(-1) * ratios).sum(-1).mean().item()
    assert kl > 1e-5
    assert found["kl"]["mean"] == pytest.approx(kl, rel=1e-4)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_what_goes_has_the_least_saliency_by_the_papers_formula(name: str, tmp_path: Path) -> None:
    """REAP, arXiv 2510.13999: S_j = mean over the tokens routed to j of g_j(x) * |f_j(x)|, of the
    whole model in float32.
    """
    import torch
    import transformers

    sizes = {"n_routed_experts": 12, "n_group": 2} if name == "DeepseekV3" else {}
    source, text = make_model(tmp_path / "source", name, **sizes), tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ("--text", text, "--sequence-length", LENGTH, "--device", "cpu", "-q")
    fp4convert("calibrate", source, "-o", tmp_path / "calibration", *options)
    experts = sizes.get("n_routed_experts", 4)
    keep = experts - 2 if sizes else 3
    fp4convert(
        "prune",
        source,
        "-o",
        tmp_path / "out",
        "--calibration",
        tmp_path / "calibration",
        "--keep",
        keep,
        "-q",
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="float32", experts_implementation="eager"
    ).eval()
    calls: dict[str, list[Any]] = {}
    watched = [
        (path, module) for path, module in model.named_modules() if path.endswith(".experts")
    ]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, path=path: calls.setdefault(path, []).append(given)
        )
        for path, module in watched
    ]
    with torch.no_grad():
        for first in range(0, len(TEXT), LENGTH):
            model(input_ids=torch.tensor([tokens_of(TEXT[first : first + LENGTH])]))
    for hook in hooks:
        hook.remove()
    kept = {}
    for path, given in calls.items():
        found = [
            float(saliency_of(model.get_submodule(path), expert, given))
            for expert in range(experts)
        ]
        size = experts // 2 if sizes else experts
        groups = [range(first, first + size) for first in range(0, experts, size)]
        gone = {
            min(group, key=lambda expert: (found[expert], -expert)) for group in groups
        }  # of equals the last
        stored = path.replace(".mlp.", ".block_sparse_moe.") if name == "Mixtral" else path
        kept[stored.removesuffix(".experts")] = [
            expert for expert in range(experts) if expert not in gone
        ]
    assert read_json(tmp_path / "out" / "expert_pruning.json")["kept"] == kept


def saliency_of(module: Any, expert: int, calls: list[Any]) -> Any:
    """What that expert answers the tokens that were sent to it, by the whole stack's own code, and
    the router's weights.
    """
    import torch

    products = []
    for hidden, chosen, weights in calls:
        token, rank = torch.where(chosen == expert)
        alone = torch.full((len(token), 1), expert)
        with torch.no_grad():
            made = (
                module(hidden[token], alone, torch.ones(len(token), 1))
                if len(token)
                else hidden[token]
            )
        products.append(weights[token, rank] * made.norm(dim=-1))
    return torch.cat(products).mean() if any(map(len, products)) else 0
