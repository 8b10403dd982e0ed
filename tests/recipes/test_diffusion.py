"""What stays and what is quantized in diffusion transformers, typed by hand from the sources that
the files name.

Names are those of Diffusers under a class, and those of single files, as ComfyUI reads them, under
--recipe.
A line: kept or not, and a module.  Where config.json tells of layers, there are 8.
"""

import pytest
from family_tables import recipe_for, rows_of

TABLE = """
Flux2Transformer2DModel
  - transformer_blocks.0.attn.to_q
  - single_transformer_blocks.0.attn.to_out
  keep double_stream_modulation_img.linear
  keep x_embedder
  keep context_embedder
  keep time_guidance_embed.timestep_embedder.linear_1
  keep norm_out.linear
  keep proj_out
--recipe flux
  - double_blocks.0.img_attn.qkv
  - model.diffusion_model.single_blocks.0.linear1
  keep model.diffusion_model.double_stream_modulation_img.lin
  keep img_in
  keep txt_in
  keep time_in.in_layer
  keep final_layer.linear
  keep final_layer.adaLN_modulation.1
  - double_blocks.0.img_mod.lin
  - double_blocks.18.txt_mlp.2
  - single_blocks.0.modulation.lin
  - model.diffusion_model.single_blocks.37.linear2
FluxTransformer2DModel
  - transformer_blocks.0.norm1.linear
  - single_transformer_blocks.37.proj_out
  - single_transformer_blocks.0.proj_mlp
  keep proj_out
  keep x_embedder
WanTransformer3DModel
  - blocks.3.attn1.to_q
  - blocks.3.ffn.net.2
  keep blocks.0.attn1.to_q
  keep blocks.1.ffn.net.2
  keep blocks.6.ffn.net.2
  keep blocks.7.attn2.to_out.0
  keep condition_embedder.time_proj
  keep proj_out
WanAnimateTransformer3DModel
  keep motion_encoder.motion_network.0
  keep face_encoder.out_proj
  - blocks.3.attn2.to_out.0
LTXVideoTransformer3DModel
  - transformer_blocks.3.ff.net.2
  keep transformer_blocks.2.attn1.to_q
  keep proj_in
  keep proj_out
  keep time_embed.linear
--recipe ltxv
  - model.diffusion_model.transformer_blocks.44.ff.net.0.proj
  keep model.diffusion_model.transformer_blocks.47.ff.net.0.proj
  keep model.diffusion_model.proj_out
  keep model.diffusion_model.patchify_proj
  keep model.diffusion_model.adaln_single.emb.timestep_embedder.linear_1
  keep model.diffusion_model.caption_projection.linear_2
SD3Transformer2DModel
  - transformer_blocks.0.norm1.linear
  - transformer_blocks.0.attn.to_add_out
  keep context_embedder
  keep norm_out.linear
--recipe sd3
  - model.diffusion_model.joint_blocks.0.x_block.attn.qkv
  - model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1
  keep model.diffusion_model.final_layer.adaLN_modulation.1
  keep model.diffusion_model.t_embedder.mlp.0
--recipe qwen_image
  - model.diffusion_model.transformer_blocks.30.attn.to_out.0
  keep model.diffusion_model.proj_out
--recipe zimage
  - model.diffusion_model.layers.0.attention.qkv
  - model.diffusion_model.context_refiner.1.feed_forward.w2
  keep model.diffusion_model.final_layer.linear
  keep model.diffusion_model.cap_embedder.1
--recipe wan
  - model.diffusion_model.blocks.10.self_attn.q
  keep model.diffusion_model.blocks.1.ffn.0
  keep text_embedding.0
  keep time_projection.1
  keep head.head
  keep img_emb.proj.1
QwenImageTransformer2DModel
  - transformer_blocks.3.attn.to_q
  - transformer_blocks.3.img_mod.1
  keep transformer_blocks.2.attn.to_q
  keep transformer_blocks.5.txt_mlp.net.2
  keep time_text_embed.timestep_embedder.linear_1
  keep img_in
  keep txt_in
  keep norm_out.linear
  keep proj_out
ZImageTransformer2DModel
  - layers.3.attention.to_q
  - layers.3.feed_forward.w1
  keep layers.3.adaLN_modulation.0
  keep all_x_embedder.2-1
  keep all_final_layer.2-1.linear
  keep cap_embedder.1
  keep t_embedder.mlp.0
HunyuanVideoTransformer3DModel
  - transformer_blocks.3.attn.to_q
  keep context_embedder.proj_in
  keep norm_out.linear
  - single_transformer_blocks.3.proj_out
  keep proj_out
--recipe hunyuan_video
  - double_blocks.0.img_attn_qkv
  - single_blocks.39.linear2
  - double_blocks.0.img_mod.linear
  - model.diffusion_model.single_blocks.0.modulation.lin
  keep txt_in.individual_token_refiner.blocks.0.mlp.fc1
  keep byt5_in.fc1
  keep final_layer.linear
  keep img_in.proj
  keep vision_in.proj.1
  keep cond_type_embedding
LTX2VideoTransformer3DModel
  - transformer_blocks.3.attn1.to_q
  keep transformer_blocks.0.attn1.to_q
  keep transformer_blocks.47.ff.net.2
  keep proj_out
  keep audio_proj_in
  keep av_cross_attn_video_scale_shift.linear
--recipe ltxv2
  keep model.diffusion_model.proj_out
  keep model.diffusion_model.av_ca_video_scale_shift_adaln_single.linear
  - model.diffusion_model.transformer_blocks.20.attn1.to_q
  keep model.diffusion_model.transformer_blocks.46.attn1.to_q
  keep model.diffusion_model.patchify_proj
  keep model.diffusion_model.adaln_single.linear
  keep vocoder.conv_pre
  keep vae.decoder.conv_in
Flux3Transformer2DModel
  - mode_blocks.image.0.attn.to_q
  keep x_embedders.image_cond
  keep timestep_embedder.linear_1
  keep early_stream_modulations.txt.linear
QwenImage21Transformer2DModel
  - transformer_blocks.3.img_mlp.gate_layer
  keep modulation.1
  keep txt_in.in_layer
Krea2Transformer2DModel
  - transformer_blocks.0.ff.gate
  - transformer_blocks.0.attn.to_gate
  keep text_fusion.refiner_blocks.0.ff.gate
--recipe krea2
  - blocks.0.mlp.gate
  - diffusion_model.blocks.0.attn.gate
  - blocks.0.attn.wq
  keep first
  keep last.linear
  keep last.modulation.lin
  keep tproj.1
  keep tmlp.0
  keep txtmlp.3
  keep txtfusion.refiner_blocks.1.mlp.gate
  keep txtfusion.projector
--recipe anima
  - net.blocks.2.adaln_modulation_mlp.1
  - net.blocks.1.cross_attn.output_proj
  keep net.blocks.0.self_attn.q_proj
  keep net.blocks.1.adaln_modulation_self_attn.2
  keep net.final_layer.linear
  keep net.llm_adapter.blocks.3.self_attn.q_proj
  keep net.x_embedder.proj.1
  keep net.t_embedder.1.linear_2
--recipe ernie_image
  - model.diffusion_model.layers.35.mlp.linear_fc2
  keep model.diffusion_model.adaLN_modulation.1
  keep model.diffusion_model.final_linear
  keep model.diffusion_model.text_proj
--recipe minimax_h3
  - blocks.0.attn.qkv_proj
  - blocks.49.adaln_proj.linear
  - token_refiner.blocks.0.mlp.fc1
  keep final_layer.video_out
  keep final_layer.adaln_proj.linear
  keep video_patch_proj
  keep model.diffusion_model.time_embedder.proj_in
  keep condition_proj
--recipe hidream
  - double_stream_blocks.0.block.ff_i.experts.3.w2
  - model.language_model.layers.0.self_attn.q_proj
  keep single_stream_blocks.31.block.ff_i.gate
  keep x_embedder.proj1
  keep t_embedder1.mlp.0
  keep final_layer2.linear
  keep p_embedder.pooled_embedder.linear_1
--recipe chroma
  - double_blocks.0.img_attn.qkv
  - single_blocks.37.linear2
  keep distilled_guidance_layer.layers.4.in_layer
  keep final_layer.linear
  keep img_in
  keep nerf_blocks.0.param_generator
--recipe longcat_image
  - model.diffusion_model.single_transformer_blocks.3.proj_out
  keep model.diffusion_model.proj_out
--recipe ideogram4
  - layers.3.adaln_modulation
  keep adaln_proj
  keep llm_cond_proj
--recipe ltxv2
  keep model.diffusion_model.transformer_blocks.20.attn1.to_gate_logits
  keep model.diffusion_model.prompt_adaln_single.linear
  keep text_embedding_projection.video_aggregate_embed
"""


@pytest.mark.parametrize(("model", "module", "is_kept"), rows_of(TABLE))
def test_what_stays_of_a_diffusion_transformer(model, module, is_kept):
    assert (recipe_for(model).reason_to_keep(module) is not None) is is_kept
