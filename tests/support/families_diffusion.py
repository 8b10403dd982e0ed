"""Diffusion transformers, by hand: names and shapes as the headers of FLUX.1-dev and of Wan2.1 in
diffusers' form have them.

No engine here loads them: what is compared are their weights.
"""

from __future__ import annotations

from family import Family

Shapes = dict[str, tuple[int, ...]]
WIDTH, HEAD, TEXT, MIDDLE = (
    96,
    24,
    48,
    144,
)  # inner dimension; of one head; of the text encoder; of feed-forward layers
BLOCKS = 6  # of Wan


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _flux() -> Shapes:
    """transformer/ of FLUX.1-dev: two double blocks, whose image and text have weights of their
    own, and two single ones.
    """
    shapes = (
        _linear("x_embedder", WIDTH, 64)
        | _linear("context_embedder", WIDTH, TEXT)
        | _linear("proj_out", 64, WIDTH)
    )
    shapes |= _linear("norm_out.linear", 2 * WIDTH, WIDTH)
    for embedder, columns in (
        ("timestep_embedder", 256),
        ("guidance_embedder", 256),
        ("text_embedder", 32),
    ):
        shapes |= _linear(f"time_text_embed.{embedder}.linear_1", WIDTH, columns)
        shapes |= _linear(f"time_text_embed.{embedder}.linear_2", WIDTH, WIDTH)
    for number in range(2):
        double, single = f"transformer_blocks.{number}", f"single_transformer_blocks.{number}"
        for projection in (
            *_QKV,
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "to_out.0",
            "to_add_out",
        ):
            shapes |= _linear(f"{double}.attn.{projection}", WIDTH, WIDTH)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{double}.attn.{norm}.weight"] = (HEAD,)
        for stream, modulation in (("ff", "norm1"), ("ff_context", "norm1_context")):
            shapes |= _linear(f"{double}.{modulation}.linear", 6 * WIDTH, WIDTH)
            shapes |= _linear(f"{double}.{stream}.net.0.proj", MIDDLE, WIDTH)
            shapes |= _linear(f"{double}.{stream}.net.2", WIDTH, MIDDLE)
        for projection in _QKV:
            shapes |= _linear(f"{single}.attn.{projection}", WIDTH, WIDTH)
        shapes |= {f"{single}.attn.{norm}.weight": (HEAD,) for norm in ("norm_q", "norm_k")}
        shapes |= _linear(f"{single}.norm.linear", 3 * WIDTH, WIDTH) | _linear(
            f"{single}.proj_mlp", MIDDLE, WIDTH
        )
        shapes |= _linear(f"{single}.proj_out", WIDTH, WIDTH + MIDDLE)
    return shapes


def _wan() -> Shapes:
    """transformer/ of Wan2.1-T2V-14B: blocks with attention to themselves and to the text."""
    shapes = {"patch_embedding.weight": (WIDTH, 16, 1, 2, 2), "patch_embedding.bias": (WIDTH,)}
    shapes |= {"scale_shift_table": (1, 2, WIDTH)} | _linear("proj_out", 64, WIDTH)
    shapes |= _linear("condition_embedder.time_embedder.linear_1", WIDTH, 256)
    shapes |= _linear("condition_embedder.time_embedder.linear_2", WIDTH, WIDTH)
    shapes |= _linear("condition_embedder.time_proj", 6 * WIDTH, WIDTH)
    shapes |= _linear("condition_embedder.text_embedder.linear_1", WIDTH, TEXT)
    shapes |= _linear("condition_embedder.text_embedder.linear_2", WIDTH, WIDTH)
    for number in range(BLOCKS):
        block = f"blocks.{number}"
        for attention in ("attn1", "attn2"):
            for projection in (*_QKV, "to_out.0"):
                shapes |= _linear(f"{block}.{attention}.{projection}", WIDTH, WIDTH)
            shapes |= {
                f"{block}.{attention}.{norm}.weight": (WIDTH,) for norm in ("norm_q", "norm_k")
            }
        shapes |= {f"{block}.norm2.weight": (WIDTH,), f"{block}.norm2.bias": (WIDTH,)}
        shapes |= _linear(f"{block}.ffn.net.0.proj", MIDDLE, WIDTH) | _linear(
            f"{block}.ffn.net.2", WIDTH, MIDDLE
        )
        shapes[f"{block}.scale_shift_table"] = (1, 6, WIDTH)
    return shapes


_QKV = ("to_q", "to_k", "to_v")

DIFFUSION = (
    Family(
        "flux",
        "",
        {
            **{
                "_class_name": "FluxTransformer2DModel",
                "num_layers": 2,
                "num_single_layers": 2,
                "guidance_embeds": True,
            },
            **{
                "attention_head_dim": HEAD,
                "num_attention_heads": 4,
                "joint_attention_dim": TEXT,
                "in_channels": 64,
            },
        },
        (
            "{transformer_blocks,single_transformer_blocks}.{0-1}.attn.(to_q to_k to_v)",
            "transformer_blocks.{0-1}.attn.(add_q_proj add_k_proj add_v_proj)",
            "transformer_blocks.{0-1}.{attn.to_out.0,attn.to_add_out,norm1.linear,norm1_context.linear}",
            "transformer_blocks.{0-1}.{ff,ff_context}.net.{0.proj,2}",
            "single_transformer_blocks.{0-1}.{norm.linear,proj_mlp,proj_out}",
        ),
        extra=_flux(),
    ),
    Family(
        "wan",
        "",
        {
            **{
                "_class_name": "WanTransformer3DModel",
                "num_layers": BLOCKS,
                "num_attention_heads": 4,
            },
            **{"attention_head_dim": HEAD, "ffn_dim": MIDDLE, "text_dim": TEXT, "in_channels": 16},
        },
        # The first two and the last two blocks stay.
        (
            "blocks.{2-3}.{attn1,attn2}.(to_q to_k to_v)",
            "blocks.{2-3}.{attn1.to_out.0,attn2.to_out.0,ffn.net.0.proj,ffn.net.2}",
        ),
        extra=_wan(),
    ),
)
