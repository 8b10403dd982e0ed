"""Diffusion transformers of 2026, by hand: names as diffusers 0.42 has them, or a single file.

A line of a table is one or several linear layers, in the notation of `quantized`, and their rows
and columns.  No engine here loads them: what is compared are their weights.
"""

from __future__ import annotations

from family import Family, modules_of

Shapes = dict[str, tuple[int, ...]]

KREA2 = """
img_in 96 64
time_embed.linear_1 96 256
{time_embed.linear_2,txt_in.linear_2} 96 96
time_mod_proj 576 96
txt_in.linear_1 96 80
text_fusion.projector 1 12
text_fusion.{layerwise_blocks,refiner_blocks}.0.attn.{to_q,to_k,to_v,to_gate,to_out.0} 80 80
text_fusion.{layerwise_blocks,refiner_blocks}.0.ff.{gate,up} 112 80
text_fusion.{layerwise_blocks,refiner_blocks}.0.ff.down 80 112
transformer_blocks.{0-1}.attn.{to_q,to_gate,to_out.0} 96 96
transformer_blocks.{0-1}.attn.{to_k,to_v} 48 96
transformer_blocks.{0-1}.ff.{gate,up} 144 96
transformer_blocks.{0-1}.ff.down 96 144
final_layer.linear 64 96
"""
ERNIE = """
text_proj 96 80
time_embedding.{linear_1,linear_2} 96 96
adaLN_modulation.1 576 96
layers.{0-1}.self_attention.{to_q,to_k,to_v,to_out.0} 96 96
layers.{0-1}.mlp.{gate_proj,up_proj} 144 96
layers.{0-1}.mlp.linear_fc2 96 144
final_norm.linear 192 96
final_linear 128 96
"""
MINIMAX_H3 = """
proj_in 96 64
audio_proj_in 96 32
context_embedder 96 80
time_embedder.linear_1 96 256
time_embedder.linear_2 48 96
token_refiner.refiner_blocks.0.attn.{to_q,to_k,to_v} 128 96
token_refiner.refiner_blocks.0.attn.to_out.0 96 128
token_refiner.refiner_blocks.0.ff.net.0.proj 288 96
token_refiner.refiner_blocks.0.ff.net.2 96 144
transformer_blocks.{0-1}.attn.{to_q,to_k,to_v} 128 96
transformer_blocks.{0-1}.attn.to_out.0 96 128
transformer_blocks.{0-1}.ff.net.0.proj 288 96
transformer_blocks.{0-1}.ff.net.2 96 144
transformer_blocks.{0-1}.adaln_proj.linear 1728 48
norm_out.linear 192 48
proj_out 96 96
audio_proj_out 32 96
"""
HIDREAM = """
t_embedder.timestep_embedder.linear_1 96 256
t_embedder.timestep_embedder.linear_2 96 96
p_embedder.pooled_embedder.linear_1 96 80
p_embedder.pooled_embedder.linear_2 96 96
x_embedder.proj 96 64
caption_projection.{0-1}.linear 96 128
double_stream_blocks.0.block.adaLN_modulation.1 1152 96
double_stream_blocks.0.block.attn1.{to_q,to_k,to_v,to_out,to_q_t,to_k_t,to_v_t,to_out_t} 96 96
double_stream_blocks.0.block.{ff_t,ff_i.experts.0,ff_i.experts.1}.{w1,w3} 144 96
double_stream_blocks.0.block.{ff_t,ff_i.experts.0,ff_i.experts.1}.w2 96 144
double_stream_blocks.0.block.ff_i.shared_experts.{w1,w3} 80 96
double_stream_blocks.0.block.ff_i.shared_experts.w2 96 80
single_stream_blocks.0.block.adaLN_modulation.1 576 96
single_stream_blocks.0.block.attn1.{to_q,to_k,to_v,to_out} 96 96
single_stream_blocks.0.block.ff_i.experts.{0-1}.{w1,w3} 144 96
single_stream_blocks.0.block.ff_i.experts.{0-1}.w2 96 144
single_stream_blocks.0.block.ff_i.shared_experts.{w1,w3} 80 96
single_stream_blocks.0.block.ff_i.shared_experts.w2 96 80
{double_stream_blocks,single_stream_blocks}.0.block.ff_i.gate 2 96
final_layer.linear 64 96
final_layer.adaLN_modulation.1 192 96
"""
# Blocks as FLUX.1 has them; the last two are Chroma's alone, and its blocks make no modulation.
CHROMA = """
x_embedder 96 64
context_embedder 96 128
transformer_blocks.{0-1}.attn.{to_q,to_k,to_v,to_out.0} 96 96
transformer_blocks.{0-1}.attn.{add_q_proj,add_k_proj,add_v_proj,to_add_out} 96 96
transformer_blocks.{0-1}.{ff,ff_context}.net.0.proj 144 96
transformer_blocks.{0-1}.{ff,ff_context}.net.2 96 144
single_transformer_blocks.{0-1}.attn.{to_q,to_k,to_v} 96 96
single_transformer_blocks.{0-1}.proj_mlp 144 96
single_transformer_blocks.{0-1}.proj_out 96 240
proj_out 64 96
distilled_guidance_layer.{in_proj,out_proj} 96 64
distilled_guidance_layer.layers.{0-1}.{linear_1,linear_2} 96 96
"""
LONGCAT_IMAGE = """
time_embed.timestep_embedder.linear_1 96 256
time_embed.timestep_embedder.linear_2 96 96
x_embedder 96 64
context_embedder 96 80
transformer_blocks.{0-1}.{norm1,norm1_context}.linear 576 96
transformer_blocks.{0-1}.attn.{to_q,to_k,to_v,to_out.0} 96 96
transformer_blocks.{0-1}.attn.{add_q_proj,add_k_proj,add_v_proj,to_add_out} 96 96
transformer_blocks.{0-1}.{ff,ff_context}.net.0.proj 144 96
transformer_blocks.{0-1}.{ff,ff_context}.net.2 96 144
single_transformer_blocks.{0-1}.norm.linear 288 96
single_transformer_blocks.{0-1}.attn.{to_q,to_k,to_v} 96 96
single_transformer_blocks.{0-1}.proj_mlp 144 96
single_transformer_blocks.{0-1}.proj_out 96 240
norm_out.linear 192 96
proj_out 64 96
"""
ANIMA = """
patch_embed.proj 96 68
time_embed.t_embedder.linear_1 96 96
time_embed.t_embedder.linear_2 288 96
transformer_blocks.{0-2}.{norm1,norm2,norm3}.linear_1 32 96
transformer_blocks.{0-2}.{norm1,norm2,norm3}.linear_2 288 32
transformer_blocks.{0-2}.{attn1,attn2}.{to_q,to_out.0} 96 96
transformer_blocks.{0-2}.attn1.{to_k,to_v} 96 96
transformer_blocks.{0-2}.attn2.{to_k,to_v} 96 64
transformer_blocks.{0-2}.ff.net.0.proj 144 96
transformer_blocks.{0-2}.ff.net.2 96 144
norm_out.linear_1 32 96
norm_out.linear_2 192 32
proj_out 64 96
"""
COSMOS3 = """
{embed_tokens,lm_head} 128 96
layers.{0-1}.self_attn.{to_q,to_out,add_q_proj,to_add_out} 96 96
layers.{0-1}.self_attn.{to_k,to_v,add_k_proj,add_v_proj} 48 96
layers.{0-1}.{mlp,mlp_moe_gen}.{gate_proj,up_proj} 144 96
layers.{0-1}.{mlp,mlp_moe_gen}.down_proj 96 144
proj_in 96 64
audio_proj_in 96 32
proj_out 64 96
audio_proj_out 32 96
time_embedder.linear_1 96 256
time_embedder.linear_2 96 96
"""
LTX23 = """
proj_in 96 64
audio_proj_in 48 64
time_embed.linear 576 96
prompt_adaln.linear 192 96
transformer_blocks.{0-2}.attn1.{to_q,to_k,to_v,to_out.0} 96 96
transformer_blocks.{0-2}.attn1.to_gate_logits 32 96
transformer_blocks.{0-2}.ff.net.0.proj 144 96
transformer_blocks.{0-2}.ff.net.2 96 144
proj_out 64 96
audio_proj_out 64 48
"""
IDEOGRAM4 = """
input_proj 96 64
llm_cond_proj 96 240
t_embedding.{mlp_in,mlp_out} 96 96
adaln_proj 64 96
layers.{0-1}.attention.{to_q,to_k,to_v,to_out.0} 96 96
layers.{0-1}.feed_forward.{w1,w3} 144 96
layers.{0-1}.feed_forward.w2 96 144
layers.{0-1}.adaln_modulation 384 64
final_layer.linear 64 96
final_layer.adaln_modulation 96 64
"""
QKV, ADDED = "(to_q to_k to_v)", "(add_q_proj add_k_proj add_v_proj)"


def _shapes(table: str) -> Shapes:
    """The tensors of a table's layers."""
    found: Shapes = {}
    for line in table.strip().splitlines():
        modules, rows, columns = line.split()
        found |= {f"{module}.weight": (int(rows), int(columns)) for module in modules_of(modules)}
    return found


def _family(name: str, kind: str, table: str, *quantized: str) -> Family:
    return Family(name, "", {"_class_name": kind, "num_layers": 2}, quantized, extra=_shapes(table))


PICTURES = (
    _family(
        "krea2",
        "Krea2Transformer2DModel",
        KREA2,
        f"transformer_blocks.{{0-1}}.attn.{QKV}",
        "transformer_blocks.{0-1}.{attn.to_gate,attn.to_out.0,ff.gate,ff.up,ff.down}",
    ),
    _family(
        "ernie_image",
        "ErnieImageTransformer2DModel",
        ERNIE,
        f"layers.{{0-1}}.self_attention.{QKV}",
        "layers.{0-1}.mlp.(gate_proj up_proj)",
        "layers.{0-1}.{self_attention.to_out.0,mlp.linear_fc2}",
    ),
    _family(
        "minimax_h3",
        "MiniMaxH3Transformer3DModel",
        MINIMAX_H3,
        f"{{token_refiner.refiner_blocks.0,transformer_blocks.0,transformer_blocks.1}}.attn.{QKV}",
        "{token_refiner.refiner_blocks.0,transformer_blocks.0,transformer_blocks.1}"
        ".{attn.to_out.0,ff.net.0.proj,ff.net.2}",
        "transformer_blocks.{0-1}.adaln_proj.linear",
    ),
    _family(
        "hidream",
        "HiDreamImageTransformer2DModel",
        HIDREAM,
        f"{{double_stream_blocks,single_stream_blocks}}.0.block.attn1.{QKV}",
        "double_stream_blocks.0.block.attn1.(to_q_t to_k_t to_v_t)",
        "{double_stream_blocks,single_stream_blocks}.0.block.{adaLN_modulation.1,attn1.to_out}",
        "double_stream_blocks.0.block.attn1.to_out_t",
        "double_stream_blocks.0.block.ff_t.(w1 w3)",
        "double_stream_blocks.0.block.ff_t.w2",
        "{double_stream_blocks,single_stream_blocks}.0.block.ff_i"
        ".{shared_experts,experts.0,experts.1}.(w1 w3)",
        "{double_stream_blocks,single_stream_blocks}.0.block.ff_i"
        ".{shared_experts,experts.0,experts.1}.w2",
    ),
    _family(
        "chroma",
        "ChromaTransformer2DModel",
        CHROMA,
        f"{{transformer_blocks,single_transformer_blocks}}.{{0-1}}.attn.{QKV}",
        f"transformer_blocks.{{0-1}}.attn.{ADDED}",
        "transformer_blocks.{0-1}.attn.{to_out.0,to_add_out}",
        "transformer_blocks.{0-1}.{ff,ff_context}.net.{0.proj,2}",
        "single_transformer_blocks.{0-1}.{proj_mlp,proj_out}",
    ),
    _family(
        "longcat_image",
        "LongCatImageTransformer2DModel",
        LONGCAT_IMAGE,
        f"{{transformer_blocks,single_transformer_blocks}}.{{0-1}}.attn.{QKV}",
        f"transformer_blocks.{{0-1}}.attn.{ADDED}",
        "transformer_blocks.{0-1}.{attn.to_out.0,attn.to_add_out,norm1.linear,norm1_context.linear}",
        "transformer_blocks.{0-1}.{ff,ff_context}.net.{0.proj,2}",
        "single_transformer_blocks.{0-1}.{norm.linear,proj_mlp,proj_out}",
    ),
    _family(
        "anima",
        "CosmosTransformer3DModel",
        ANIMA,
        # The first block stays, and the modulations of the second.
        f"transformer_blocks.{{1-2}}.{{attn1,attn2}}.{QKV}",
        "transformer_blocks.{1-2}.{attn1.to_out.0,attn2.to_out.0,ff.net.0.proj,ff.net.2}",
        "transformer_blocks.2.{norm1,norm2,norm3}.{linear_1,linear_2}",
    ),
    _family(
        "cosmos3",
        "Cosmos3OmniTransformer",
        COSMOS3,
        f"layers.{{0-1}}.self_attn.{QKV}",
        f"layers.{{0-1}}.self_attn.{ADDED}",
        "layers.{0-1}.{mlp,mlp_moe_gen}.(gate_proj up_proj)",
        "layers.{0-1}.{self_attn.to_out,self_attn.to_add_out,mlp.down_proj,mlp_moe_gen.down_proj}",
    ),
    _family(
        "ltx23",
        "LTX2VideoTransformer3DModel",
        LTX23,
        # The first two blocks stay.
        f"transformer_blocks.2.attn1.{QKV}",
        "transformer_blocks.2.{attn1.to_out.0,ff.net.0.proj,ff.net.2}",
    ),
    _family(
        "ideogram4",
        "Ideogram4Transformer2DModel",
        IDEOGRAM4,
        f"layers.{{0-1}}.attention.{QKV}",
        "layers.{0-1}.feed_forward.(w1 w3)",
        "layers.{0-1}.{attention.to_out.0,feed_forward.w2,adaln_modulation}",
    ),
)
