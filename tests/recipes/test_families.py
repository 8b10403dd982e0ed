"""What stays and what is quantized in each family, typed by hand from the sources that the files
name, with true module names.

A line: kept or not, and a module.  Layers are those of a model of 8 layers, of which the ninth
predicts several tokens.
"""

import pytest
from family_tables import LAYERS, recipe_for, rows_of

from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe, scale_groups

TABLE = """
llama
  - model.layers.0.self_attn.q_proj
  - model.layers.0.mlp.down_proj
  keep lm_head
  keep model.embed_tokens
phi3
  - model.layers.0.self_attn.qkv_proj
  - model.layers.0.mlp.gate_up_proj
  keep lm_head
mixtral
  - model.layers.0.block_sparse_moe.experts.3.w2
  - model.layers.0.self_attn.o_proj
  keep model.layers.0.block_sparse_moe.gate
qwen2_moe
  - model.layers.0.mlp.experts.3.down_proj
  - model.layers.0.mlp.shared_expert.gate_proj
  keep model.layers.0.mlp.shared_expert_gate
  keep model.layers.0.mlp.gate
qwen3_moe
  - model.layers.0.self_attn.q_proj
  - model.layers.0.mlp.experts.127.gate_proj
  keep model.layers.0.mlp.gate
qwen3_next
  - model.layers.3.self_attn.o_proj
  - model.layers.0.mlp.experts.3.up_proj
  - model.layers.0.mlp.shared_expert.up_proj
  keep model.layers.3.self_attn.q_proj
  keep model.layers.3.self_attn.k_proj
  keep model.layers.3.self_attn.v_proj
  keep model.layers.0.linear_attn.in_proj_qkvz
  keep model.layers.0.linear_attn.in_proj_ba
  keep model.layers.0.linear_attn.out_proj
  keep mtp.fc
  keep mtp.layers.0.mlp.experts.3.up_proj
qwen3_5
  - model.language_model.layers.0.mlp.gate_proj
  keep model.language_model.layers.3.self_attn.q_proj
  keep model.language_model.layers.3.self_attn.o_proj
  keep model.language_model.layers.0.linear_attn.in_proj_qkv
  keep model.language_model.layers.0.linear_attn.in_proj_z
  keep model.language_model.layers.0.linear_attn.in_proj_a
  keep model.visual.blocks.0.mlp.linear_fc1
  keep mtp.layers.0.mlp.up_proj
  keep lm_head
qwen3_5_moe
  - model.language_model.layers.0.mlp.experts.3.up_proj
  keep model.language_model.layers.0.mlp.shared_expert.up_proj
  keep model.language_model.layers.0.mlp.shared_expert_gate
  keep model.language_model.layers.3.self_attn.v_proj
  keep model.language_model.layers.0.linear_attn.out_proj
qwen4_exp
  - model.language_model.layers.0.mlp.experts.3.up_proj
  keep model.language_model.layers.0.attn_hyper_connection.block_inject_weight
  keep model.language_model.layers.0.mlp.shared_expert.up_proj
  keep model.language_model.layers.3.self_attn.o_proj
  keep model.language_model.layers.0.linear_attn.in_proj_z
  keep model.language_model.layers.1.ple.key_proj
  keep model.visual.blocks.0.attn.qkv
qwen3_vl_moe
  - model.language_model.layers.0.mlp.experts.3.gate_proj
  - model.language_model.layers.0.self_attn.q_proj
  keep model.language_model.layers.0.mlp.gate
  keep model.visual.blocks.0.attn.qkv
qwen3_omni_moe
  - thinker.model.layers.0.mlp.experts.3.up_proj
  keep thinker.audio_tower.layers.0.fc1
  keep thinker.visual.blocks.0.attn.qkv
  keep talker.model.layers.0.self_attn.q_proj
  keep code2wav.pre_transformer.layers.0.mlp.up_proj
gemma3
  - language_model.model.layers.0.mlp.gate_proj
  keep vision_tower.vision_model.encoder.layers.0.mlp.fc1
  keep multi_modal_projector.mm_input_projection
gemma4
  - model.language_model.layers.0.mlp.gate_proj
  - model.language_model.layers.0.experts.3.gate_proj
  keep model.language_model.layers.0.router.proj
  keep model.language_model.layers.0.per_layer_input_gate
  keep model.language_model.layers.0.per_layer_projection
  keep model.embed_vision.embedding_projection
  keep model.embed_audio.embedding_projection
  keep model.audio_tower.layers.0.self_attn.q_proj.linear
  keep model.vision_tower.encoder.layers.0.mlp.up_proj.linear
llama4
  - language_model.model.layers.0.feed_forward.experts.3.down_proj
  - language_model.model.layers.0.feed_forward.shared_expert.up_proj
  keep language_model.model.layers.0.feed_forward.router
  keep language_model.model.layers.0.self_attn.q_proj
  keep vision_model.model.layers.0.mlp.fc1
  keep multi_modal_projector.linear_1
deepseek_v3
  - model.layers.3.mlp.experts.255.down_proj
  - model.layers.3.mlp.shared_experts.up_proj
  - model.layers.0.mlp.gate_proj
  keep model.layers.3.self_attn.q_a_proj
  keep model.layers.3.self_attn.kv_a_proj_with_mqa
  keep model.layers.3.self_attn.o_proj
  keep model.layers.3.mlp.gate
  keep model.layers.8.mlp.experts.3.up_proj
  keep model.layers.8.eh_proj
  keep model.layers.8.shared_head.head
deepseek_v32
  - model.layers.3.mlp.experts.3.up_proj
  keep model.layers.3.self_attn.indexer.wq_b
  keep model.layers.8.mlp.shared_experts.up_proj
deepseek_v4
  - layers.3.ffn.experts.3.w1
  keep layers.3.ffn.shared_experts.w1
  keep layers.3.ffn.gate
  keep layers.3.attn.wq_a
  keep layers.3.attn.indexer.weights_proj
  keep layers.3.hc_attn_fn
  keep embed
  keep head
  keep mtp.0.ffn.experts.3.w1
kimi_k2
  - model.layers.3.mlp.experts.383.up_proj
  keep model.layers.3.mlp.shared_experts.up_proj
  keep model.layers.0.mlp.up_proj
  keep model.layers.3.self_attn.q_b_proj
  keep model.layers.3.mlp.gate
kimi_k25
  - language_model.model.layers.3.mlp.experts.3.up_proj
  keep language_model.model.layers.0.mlp.down_proj
  keep mm_projector.proj.0
  keep vision_tower.encoder.blocks.0.mlp.fc0
kimi_k3
  - model.layers.3.block_sparse_moe.experts.3.w3
  keep model.layers.3.block_sparse_moe.gate
  keep model.layers.3.block_sparse_moe.routed_expert_down_proj
  keep model.layers.3.block_sparse_moe.shared_experts.up_proj
  keep model.layers.3.self_attn.q_proj
  keep model.layers.3.self_attention_res_proj
  keep model.output_attn_res_proj
  keep model.layers.0.mlp.gate_up_proj
glm4_moe
  - model.layers.3.mlp.experts.3.up_proj
  keep model.layers.3.mlp.shared_experts.up_proj
  keep model.layers.0.mlp.down_proj
  keep model.layers.3.self_attn.q_proj
  keep model.layers.8.mlp.experts.3.up_proj
glm4v_moe
  - model.language_model.layers.3.mlp.experts.3.up_proj
  keep model.language_model.layers.8.mlp.experts.3.up_proj
  keep model.visual.blocks.0.mlp.gate_proj
glm4_moe_lite
  - model.layers.3.mlp.experts.3.up_proj
  - model.layers.3.mlp.shared_experts.up_proj
  keep model.layers.1.mlp.up_proj
  keep model.layers.3.self_attn.o_proj
  keep model.layers.8.mlp.experts.3.up_proj
glm_moe_dsa
  - model.layers.3.mlp.experts.3.up_proj
  - model.layers.3.mlp.shared_experts.up_proj
  keep model.layers.2.mlp.up_proj
  keep model.layers.3.self_attn.q_a_proj
  keep model.layers.8.mlp.experts.3.up_proj
glm5_next
  - model.language_model.layers.3.mlp.experts.3.up_proj
  - model.language_model.layers.3.mlp.shared_experts.up_proj
  keep model.language_model.layers.0.mlp.up_proj
  keep model.language_model.layers.3.self_attn.q_proj
  keep model.language_model.layers.8.mlp.experts.3.up_proj
  keep model.visual.blocks.0.attn.qkv
minimax_m2
  - model.layers.3.block_sparse_moe.experts.3.gate_proj
  keep model.layers.3.block_sparse_moe.gate
  keep model.layers.3.self_attn.o_proj
minimax_m3_vl
  - language_model.model.layers.3.block_sparse_moe.experts.3.w1
  keep language_model.model.layers.3.block_sparse_moe.shared_experts.up_proj
  keep language_model.model.layers.3.block_sparse_moe.gate
  keep language_model.model.layers.3.self_attn.q_proj
  keep patch_merge_mlp.linear_1
  keep multi_modal_projector.linear_1
gpt_oss
  - model.layers.3.mlp.experts.3.up_proj
  keep model.layers.3.mlp.router
  keep model.layers.3.self_attn.q_proj
  keep model.embed_tokens
nemotron_h
  - backbone.layers.3.mixer.experts.3.up_proj
  - backbone.layers.5.mixer.down_proj
  keep backbone.layers.3.mixer.shared_experts.up_proj
  keep backbone.layers.3.mixer.fc1_latent_proj
  keep backbone.layers.3.mixer.gate
  keep backbone.layers.0.mixer.in_proj
  keep backbone.layers.0.mixer.out_proj
  keep backbone.layers.0.mixer.conv1d
  keep backbone.layers.7.mixer.q_proj
  keep backbone.layers.7.mixer.o_proj
  keep backbone.embeddings
  keep mtp.layers.0.mixer.q_proj
granitemoehybrid
  - model.layers.3.block_sparse_moe.experts.3.gate_proj
  - model.layers.3.shared_mlp.input_linear
  keep model.layers.3.block_sparse_moe.router.layer
  keep model.layers.3.mamba.conv1d
dbrx
  - transformer.blocks.0.ffn.experts.mlp.3.w1
  - transformer.blocks.0.norm_attn_norm.attn.Wqkv
  keep transformer.blocks.0.ffn.router.layer
  keep lm_head
grok-1
  - model.layers.0.moe_block.experts.3.linear_v
  keep model.layers.0.moe_block.gate
lfm2
  - model.layers.0.feed_forward.w1
  - model.layers.2.self_attn.q_proj
  keep model.layers.0.conv.in_proj
  keep model.layers.0.conv.out_proj
lfm2_moe
  - model.layers.2.feed_forward.experts.3.w1
  keep model.layers.2.feed_forward.gate
  keep model.layers.0.conv.in_proj
muse_glimmer
  - model.language_model.layers.0.mlp.up_proj
  keep model.vision_adapter.fc1
  keep model.vision_projection
  keep model.vision_tower.layers.0.attn.q_proj
  keep model.language_model.layers.0.self_attn.gate_proj
ernie4_5_moe
  - model.layers.1.mlp.experts.3.up_proj
  - model.layers.0.self_attn.q_proj
  - model.layers.1.mlp.shared_experts.up_proj
  keep model.layers.1.mlp.gate
  keep model.mtp_block.0.self_attn.q_proj
  keep model.mtp_block.0.mlp.gate_proj
  keep model.mtp_linear_proj.0
  keep model.mtp_emb_norm.0
  keep model.mtp_hidden_norm.0
step3p5
  - model.layers.3.moe.experts.3.up_proj
  - model.layers.0.mlp.up_proj
  keep model.layers.3.moe.gate
  keep model.layers.3.share_expert.up_proj
  keep model.layers.3.self_attn.g_proj
  keep model.layers.3.self_attn.q_proj
  keep model.layers.8.eh_proj
  keep model.layers.8.mlp.up_proj
mistral_large_3
  - layers.3.experts.3.w1
  - layers.3.attention.wq_b
  keep layers.3.attention.wq_a
  keep layers.3.attention.wkv_a_with_mqa
  keep layers.3.gate
  keep tok_embeddings
  keep output
  keep patch_merger.merging_layer
  keep vision_encoder.transformer.layers.0.feed_forward.w1
  keep vision_language_adapter.w_in
--recipe mistral_medium_3_5
  - model.language_model.layers.5.mlp.up_proj
  keep model.language_model.layers.3.mlp.up_proj
  keep model.language_model.layers.7.mlp.up_proj
  keep model.language_model.layers.5.self_attn.q_proj
afmoe
  - model.layers.3.mlp.experts.3.up_proj
  - model.layers.3.mlp.shared_experts.up_proj
  keep model.layers.3.mlp.router.gate
  keep model.layers.3.self_attn.gate_proj
longcat_flash
  - model.layers.3.mlp.experts.3.up_proj
  - model.layers.3.mlps.0.up_proj
  keep model.layers.3.mlp.router.classifier
  keep model.mtp.layers.0.self_attn.q_a_proj
hunyuan_v1_moe
  - model.layers.3.mlp.shared_mlp.up_proj
  keep model.layers.3.mlp.gate.wg
lighton_ocr
  - model.language_model.layers.0.mlp.up_proj
  keep model.vision_encoder.transformer.layers.0.feed_forward.gate_proj
  keep model.vision_projection.patch_merger.merging_layer
molmo2
  - model.transformer.blocks.0.self_attn.att_proj
  keep model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq
  keep model.vision_backbone.image_pooling_2d.wo
  keep model.vision_backbone.image_projector.w1
video_llava
  - language_model.model.layers.0.mlp.up_proj
  keep video_tower.vision_model.encoder.layers.0.mlp.fc1
  keep image_tower.vision_model.encoder.layers.0.mlp.fc1
granite_speech
  - language_model.model.layers.0.mlp.up_proj
  keep encoder.layers.0.attn.to_kv
  keep encoder.layers.0.attn.rel_pos_emb
  keep encoder.out_mid
  keep projector.qformer.encoder.layer.0.attention.attention.query
  keep projector.linear
granite4_vision
  - model.language_model.layers.0.mlp.up_proj
  keep model.layerwise_projectors.0.out_linear
  keep model.spatial_projectors.0.qformer.encoder.layer.0.output_query.dense
hunyuan_vl
  - model.layers.0.mlp.up_proj
  keep vit.layers.0.mlp.dense_h_to_4h
  keep model.vit.perceive.mlp
deepseek_ocr2
  - model.layers.0.mlp.up_proj
  keep model.sam_model.blocks.0.attn.qkv
  keep model.qwen2_model.model.model.layers.0.mlp.up_proj
  keep model.projector.layers
emu3
  - text_model.model.layers.0.mlp.up_proj
  keep vqmodel.encoder.middle_block.attn_1.q_proj
kyutai_speech_to_text
  - model.layers.0.self_attn.o_proj.linear
  keep codec_model.encoder_transformer.layers.0.mlp.fc1
qwen2_5_omni
  - thinker.model.layers.0.mlp.up_proj
  keep thinker.audio_tower.layers.0.fc1
  keep thinker.visual.blocks.0.attn.proj
  keep talker.model.layers.0.mlp.up_proj
  keep token2wav.code2wav_dit_model.transformer_blocks.0.attn.to_q
nemo_speechlm
  - llm.model.layers.0.mixer.up_proj
  keep perception.encoder.asr_encoder.layers.0.self_attn.linear_q
  keep perception.proj
  keep ctc_timestamp.decoder.transformer.layers.0.fc1
  keep model.word_timestamp_encoder.layers.0.fc1
seamless_m4t
  - text_encoder.layers.0.ffn.fc1
  - text_decoder.layers.0.ffn.fc1
  keep speech_encoder.encoder.layers.0.ffn1.intermediate_dense
hy_v3
  - model.layers.3.mlp.shared_mlp.up_proj
  keep model.layers.3.mlp.router.gate
  keep model.layers.8.mlp.experts.0.up_proj
dots3_note
  - model.layers.3.self_attn.q_b_proj
  keep model.layers.3.self_attn.g_proj
  keep model.layers.3.self_attn.indexer.wk
  keep model.layers.8.self_attn.q_b_proj
beam
  keep model.layers.0.self_attn.gate_proj
hrm_text
  keep model.H_module.layers.0.attn.gqkv_proj
  - model.H_module.layers.0.attn.o_proj
inkling2
  keep model.llm.layers.0.attn.gate_attn
  keep model.llm.layers.0.attn.attn_sink_proj
  - model.llm.layers.0.attn.wq_du
muse_spark
  keep model.language_model.layers.0.mlp.pre_expert_proj
  - model.language_model.layers.0.mlp.experts.0.up_proj
muse_glimmer_assistant
  keep encoder.fc
  - layers.0.mlp.up_proj
gemma4_assistant
  keep pre_projection
  keep post_projection
  - model.layers.0.mlp.up_proj
embedding_gemma2
  keep language_model.ple.per_layer_model_projection
voxtral_realtime
  keep language_model.model.layers.0.ada_rms_norm.linear1
  - language_model.model.layers.0.mlp.up_proj
vibevoice
  keep model.diffusion_head.layers.0.ffn.up_proj
starcoder2
  - model.layers.0.mlp.c_fc
t5
  - encoder.block.0.layer.0.SelfAttention.q
bart
  - model.encoder.layers.0.fc1
florence2
  - language_model.model.encoder.layers.0.fc1
  keep vision_tower.blocks.0.0.spatial_block.ffn.fn.net.fc1
whisper
  keep model.encoder.layers.0.fc1
  - model.decoder.layers.0.encoder_attn.k_proj
"""


@pytest.mark.parametrize(("model", "module", "is_kept"), rows_of(TABLE))
def test_what_stays_in_a_family(model, module, is_kept):
    assert (recipe_for(model).reason_to_keep(module) is not None) is is_kept


def test_the_table_speaks_of_forty_models():
    assert len({model for model, _, _ in rows_of(TABLE)}) >= 40


@pytest.mark.parametrize(
    ("model", "module", "members"),
    [
        ("mixtral", "experts.0.w3", "w1 w3"),
        ("minimax_m2", "experts.0.w1", "w1 w3"),
        ("dbrx", "experts.mlp.0.v1", "w1 v1"),
        ("grok-1", "experts.0.linear_v", "linear linear_v"),
        ("deepseek_v3", "self_attn.q_a_proj", "q_a_proj kv_a_proj_with_mqa"),
        ("kimi_k2", "self_attn.kv_a_proj_with_mqa", "q_a_proj kv_a_proj_with_mqa"),
        ("mistral_large_3", "attention.wq_a", "wq_a wkv_a_with_mqa"),
        ("mistral_large_3", "attention.wk", "wq wk wv"),
        ("gpt_oss", "experts.0.up_proj", "gate_proj up_proj"),
        ("granitemoe", "block_sparse_moe.experts.0.up_proj", "gate_proj up_proj"),
        ("WanTransformer3DModel", "blocks.3.attn1.to_v", "to_q to_k to_v"),
        ("QwenImageTransformer2DModel", "attn.add_k_proj", "add_q_proj add_k_proj add_v_proj"),
        ("unheard_of", "self_attn.k_proj", "q_proj k_proj v_proj"),
        ("nemotron_h", "mixer.experts.0.down_proj", ""),
    ],
)
def test_what_shares_a_scale_in_a_family(model, module, members):
    (group,) = scale_groups([f"model.layers.0.{module}"], recipe_for(model).groups).values() or (
        None,
    )
    assert " ".join(group.members if group else ()) == members


@pytest.mark.parametrize(
    ("model", "module"),
    [
        *(
            (model, leaf)
            for model in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
            for leaf in ("q_proj", "k_proj", "v_proj")
        ),
        *((model, "gate_proj") for model in ("muse_glimmer", "afmoe", "beam")),
        *((model, "g_proj") for model in ("step3p5", "laguna", "dots3_note")),
        ("hy_v4", "linear_gate"),
        ("axk2", "q_b_proj"),
    ],
)
def test_the_gate_of_attention_is_taken_by_no_mode(model, module, tmp_path):
    """Perplexity 65 for Qwen3.6-27B with this gate in four bits (Model-Optimizer issue 2091);
    engines fuse q, k and v.
    """
    name, config = f"model.layers.3.self_attn.{module}", {"model_type": model, **LAYERS}
    (tmp_path / "mine.toml").write_text('[[format]]\nmodules = ["*.self_attn.*"]\nformat = "nvfp4"')
    for chosen in (None, "all", str(tmp_path / "mine.toml")):
        assert build_recipe(Target("nvfp4"), config, RecipeOptions(recipe=chosen)).reason_to_keep(
            name
        )
    assert (
        build_recipe(
            Target("nvfp4"), config, RecipeOptions(recipe="all", include=(name,))
        ).reason_to_keep(name)
        is None
    )
    assert (
        build_recipe(Target("nvfp4"), config, RecipeOptions(recipe="all")).reason_to_keep(
            "model.layers.3.self_attn.o_proj"
        )
        is None
    )
