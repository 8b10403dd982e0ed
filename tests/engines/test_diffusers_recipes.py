"""What stays of every diffusion transformer that Diffusers has and a recipe is for, at its
published size.

The models are Diffusers' own, without weights; what stays is typed here by hand, from the sources
that the recipes name.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from fp4convert.recipes.recipe import Target, build_recipe

diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install diffusers pillow"
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.*Enum subclass"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SD35_LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
WAN_IMAGE = {"image_dim": 1280, "added_kv_proj_dim": 5120, "in_channels": 36}
FRAMEPACK = {"has_image_proj": True, "has_clean_x_embedder": True}

TEXT_EMBED = [
    f"time_text_embed.{part}_embedder.linear_{at}" for part in ("timestep", "text") for at in (1, 2)
]
GUIDANCE = [f"time_text_embed.guidance_embedder.linear_{at}" for at in (1, 2)]
ENDS = ["norm_out.linear", "proj_out"]
WAN_ENDS = ["proj_out", "condition_embedder.time_proj"]
WAN_ENDS += [
    f"condition_embedder.{part}_embedder.linear_{at}" for part in ("time", "text") for at in (1, 2)
]
IMAGE = [f"condition_embedder.image_embedder.ff.net.{leaf}" for leaf in ("0.proj", "2")]
REFINED = [f"context_embedder.{name}" for name in TEXT_EMBED] + ["context_embedder.proj_in"]
REFINED += [
    f"context_embedder.token_refiner.refiner_blocks.#.{leaf}"
    for leaf in (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "ff.net.0.proj",
        "ff.net.2",
        "norm_out.linear",
    )
]


def two(name: str) -> list[str]:
    return [f"{name}.linear_1", f"{name}.linear_2"]


def emb(name: str) -> list[str]:
    return [f"{name}.linear", *two(f"{name}.emb.timestep_embedder")]


LTX = ["proj_in", "proj_out", *emb("time_embed"), *two("caption_projection")]
CROSS = [
    f"av_cross_attn_{part}"
    for part in ("video_scale_shift", "audio_scale_shift", "video_a2v_gate", "audio_v2a_gate")
]
FLUX2_TIME = [
    *two("time_guidance_embed.timestep_embedder"),
    *two("time_guidance_embed.guidance_embedder"),
]
ADAPTER = [f"face_adapter.#.{leaf}" for leaf in ("to_q", "to_k", "to_v", "to_out")]

# class, settings beside its own, what stays (# is any number) beside whole blocks, those blocks, at
# most that share of weights
TABLE: list[tuple[str, dict[str, Any], list[str], str, float]] = [
    (
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        [*TEXT_EMBED, *GUIDANCE, "x_embedder", "context_embedder", *ENDS],
        "",
        0.01,
    ),
    (
        "Flux2Transformer2DModel",
        {},
        [
            *FLUX2_TIME,
            *(
                "double_stream_modulation_img.linear",
                "double_stream_modulation_txt.linear",
                "single_stream_modulation.linear",
            ),
            *("x_embedder", "context_embedder", *ENDS),
        ],
        "",
        0.03,
    ),
    ("WanTransformer3DModel", {}, WAN_ENDS, r"blocks\.(0|1|38|39)\.", 0.12),
    ("WanTransformer3DModel", WAN_IMAGE, [*WAN_ENDS, *IMAGE], r"blocks\.(0|1|38|39)\.", 0.12),
    ("WanVACETransformer3DModel", {}, WAN_ENDS, r"blocks\.(0|1|38|39)\.|vace_blocks\.[01]\.", 0.15),
    (
        "WanAnimateTransformer3DModel",
        {},
        [
            *WAN_ENDS,
            *IMAGE,
            *ADAPTER,
            "face_encoder.out_proj",
            *(f"motion_encoder.motion_network.{at}" for at in range(5)),
        ],
        r"blocks\.(0|1|38|39)\.",
        0.17,
    ),
    (
        "QwenImageTransformer2DModel",
        {},
        [*two("time_text_embed.timestep_embedder"), "img_in", "txt_in", *ENDS],
        r"transformer_blocks\.(0|1|2|57|58|59)\.",
        0.11,
    ),
    ("HunyuanVideoTransformer3DModel", {}, [*REFINED, *TEXT_EMBED, *GUIDANCE, *ENDS], "", 0.03),
    (
        "HunyuanVideo15Transformer3DModel",
        {},
        [
            *(
                *REFINED,
                *two("image_embedder"),
                *two("context_embedder_2"),
                "context_embedder_2.linear_3",
            ),
            *(*two("time_embed.timestep_embedder"), "cond_type_embed", *ENDS),
        ],
        "",
        0.03,
    ),
    (
        "HunyuanVideoFramepackTransformer3DModel",
        FRAMEPACK,
        [*REFINED, *TEXT_EMBED, *GUIDANCE, "image_projection.up", "image_projection.down", *ENDS],
        "",
        0.04,
    ),
    ("LTXVideoTransformer3DModel", {}, LTX, r"transformer_blocks\.[012]\.", 0.13),
    (
        "LTXVideoTransformer3DModel",
        {"num_layers": 48},
        LTX,
        r"transformer_blocks\.(0|1|2|45|46|47)\.",
        0.14,
    ),
    (
        "LTX2VideoTransformer3DModel",
        {},
        [
            *(
                *LTX,
                "audio_proj_in",
                "audio_proj_out",
                *emb("audio_time_embed"),
                *two("audio_caption_projection"),
            ),
            *(name for part in CROSS for name in emb(part)),
        ],
        r"transformer_blocks\.(0|1|46|47)\.",
        0.11,
    ),
    ("SD3Transformer2DModel", SD35_LARGE, [*TEXT_EMBED, "context_embedder", *ENDS], "", 0.01),
    (
        "ZImageTransformer2DModel",
        {},
        [
            *(
                "all_x_embedder.2-1",
                "all_final_layer.2-1.linear",
                "all_final_layer.2-1.adaLN_modulation.1",
                "cap_embedder.1",
            ),
            *(
                "t_embedder.mlp.0",
                "t_embedder.mlp.2",
                "layers.#.adaLN_modulation.0",
                "noise_refiner.#.adaLN_modulation.0",
            ),
        ],
        "",
        0.03,
    ),
    (
        "Krea2Transformer2DModel",
        {},
        [
            *("img_in", "time_mod_proj", *two("time_embed"), *two("txt_in"), "final_layer.linear"),
            "text_fusion.projector",
            *(
                f"text_fusion.{part}_blocks.#.{leaf}"
                for part in ("layerwise", "refiner")
                for leaf in (
                    *(f"attn.to_{name}" for name in ("q", "k", "v", "gate", "out.0")),
                    *(f"ff.{name}" for name in ("gate", "up", "down")),
                )
            ),
        ],
        "",
        0.06,
    ),
    (
        "ErnieImageTransformer2DModel",
        {},
        [
            *("text_proj", *two("time_embedding"), "adaLN_modulation.1"),
            *("final_norm.linear", "final_linear"),
        ],
        "",
        0.04,
    ),
    (
        "MiniMaxH3Transformer3DModel",
        {},
        [
            *("proj_in", "audio_proj_in", "context_embedder", *two("time_embedder")),
            *(*ENDS, "audio_proj_out"),
        ],
        "",
        0.01,
    ),
    (
        "ChromaTransformer2DModel",
        {},
        [
            *("x_embedder", "context_embedder", "proj_out"),
            *(f"distilled_guidance_layer.{part}_proj" for part in ("in", "out")),
            *two("distilled_guidance_layer.layers.#"),
        ],
        "",
        0.04,
    ),
    (
        "LongCatImageTransformer2DModel",
        {},
        [*two("time_embed.timestep_embedder"), "x_embedder", "context_embedder", *ENDS],
        "",
        0.01,
    ),
    (
        "OvisImageTransformer2DModel",
        {},
        [*two("timestep_embedder"), "x_embedder", "context_embedder", *ENDS],
        "",
        0.01,
    ),
    (
        "CosmosTransformer3DModel",
        {},
        [
            *("patch_embed.proj", *two("time_embed.t_embedder"), *two("norm_out"), "proj_out"),
            *(name for at in (1, 2, 3) for name in two(f"transformer_blocks.#.norm{at}")),
        ],
        r"transformer_blocks\.0\.",
        0.05,
    ),
    (
        "Cosmos3OmniTransformer",
        {},
        ["embed_tokens", "lm_head", "proj_in", "proj_out", *two("time_embedder")],
        "",
        0.09,
    ),
    (
        "Ideogram4Transformer2DModel",
        {},
        [
            *("input_proj", "llm_cond_proj", "t_embedding.mlp_in", "t_embedding.mlp_out"),
            *("adaln_proj", "embed_image_indicator"),
            *("final_layer.linear", "final_layer.adaln_modulation"),
        ],
        "",
        0.04,
    ),
]


@pytest.mark.parametrize(("name", "settings", "stays", "blocks", "most"), TABLE)
def test_what_stays_of_a_published_model(name, settings, stays, blocks, most):
    import torch

    kind = getattr(
        diffusers, name
    )  # imported before: tensors of its modules must not be without data
    with torch.device("meta"):
        model = kind(**settings)
    recipe = build_recipe(Target("nvfp4"), {"_class_name": name, **model.config})
    weights = {
        parameter.removesuffix(".weight"): tensor.numel()
        for parameter, tensor in model.named_parameters()
        if tensor.ndim == 2 and parameter.endswith(".weight")
    }
    kept = {module for module in weights if recipe.reason_to_keep(module)}
    named = {module for module in kept if not (blocks and re.match(blocks, module))}
    assert {
        re.sub(r"(blocks|layers|refiner|adapter)\.\d+\.", r"\1.#.", module) for module in named
    } == set(stays)
    assert all(module in kept for module in weights if blocks and re.match(blocks, module))
    assert sum(weights[module] for module in kept) / sum(weights.values()) < most
