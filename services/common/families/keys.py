"""Lists of the known keys in a checkpoint's JSON files.

A known key is either read, so that its value is applied or refused by name, or ignored for a stated
reason. An unknown key is logged as a warning when a model is loaded. `scripts/reference.py` writes
`docs/checkpoints.md` from these lists.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from services.common.families import clip_processor, image_processor, video_processor
from services.common.families.generation import NEUTRAL
from services.common.model_spec import read_json

_NAMES = "a name or a version"
_TRAINING = "used in training only"
_RETURNED = "an argument or a return value of a method of transformers"
_SPECULATION = "speculative decoding does not change answers"
_BEAMS = "beam search, which `num_beams` enables, is refused"
_PLACES = "tokenizer.json has the same information"
_MEMORY = "memory and speed of transformers"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that are read. An unsupported value is refused by the key's name.
READ: dict[str, frozenset[str]] = {
    "config.json": _words(
        """
        architectures attention_bias attn_output_gate compression_config
        decoder_sparse_step dim embed_dim eos_token_id full_attention_interval head_dim hidden_act
        head_dims hidden_size image_token_id intermediate_size language_model_only layer_scale
        layer_types
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim mamba_ssm_dtype
        max_position_embeddings max_window_layers mlp_bias mlp_only_layers
        moe_intermediate_size n_routed_experts norm_topk_prob num_attention_heads
        num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
        num_local_experts original_max_position_embeddings output_gate_type
        partial_rotary_factor qkv_bias quantization_config retrieval_attention_contract
        rms_norm_eps rope_parameters
        rope_scaling rope_theta shared_expert_intermediate_size sliding_window
        compression_ratio rope_is_neox_style use_3d_rope use_bias
        text_config tie_word_embeddings use_mrope use_qk_norm use_sliding_window video_token_id
        vision_config
        vision_end_token_id vision_start_token_id vocab_size
        """
    ),
    "config.json: vision_config": _words(
        """
        deepstack_visual_indexes depth embed_dim fullatt_block_indexes hidden_act hidden_size
        image_size in_channels in_chans layer_norm_eps num_attention_heads num_channels
        num_hidden_layers
        intermediate_size mlp_ratio num_heads num_position_embeddings out_hidden_size patch_size
        rope_parameters spatial_merge_size spatial_patch_size temporal_patch_size
        tokens_per_second window_size
        """
    ),
    "config.json: quantization_config": _words(
        """
        act_bits activation_scheme backend bits checkpoint_format config_groups data_type
        desc_act dynamic extra_config fmt format group_size ignore ignored_layers
        is_marlin_format kv_cache_quant_algo kv_cache_scheme lm_head modules_to_not_convert
        pack_dtype packing_format quant_algo quant_method quantization quantized_layers scale_fmt
        sparsity_config sym transform_config version weight_block_size zero_point
        """
    ),
    "generation_config.json": frozenset(NEUTRAL)
    | _words(
        """
        do_sample eos_token_id frequency_penalty max_new_tokens min_p presence_penalty
        repetition_penalty temperature top_k top_p
        """
    ),
    "tokenizer_config.json": _words(
        """
        bos_token chat_template cls_token eos_token mask_token pad_token sep_token
        unk_token
        """
    ),
    "preprocessor_config.json": frozenset(image_processor.DEFAULTS)
    | _words("max_pixels min_pixels"),
    "video_preprocessor_config.json": frozenset(video_processor.DEFAULTS)
    | frozenset(clip_processor.DEFAULTS),
    "processor_config.json": _words(
        "image_processor query_prefix video_processor visual_prompt_prefix visual_prompt_suffix"
    ),
}

_REASONS: dict[str, dict[str, str]] = {
    "config.json": {
        _NAMES: """_name_or_path auto_map model_type transformers_version unsloth_fixed
                unsloth_version""",
        _TRAINING: """attention_dropout hidden_dropout hidden_dropout_prob ignored_index
                initializer_range output_router_logits pretraining_tp router_aux_loss_coef
                weight_share_add_bias""",
        _RETURNED: """add_cross_attention chunk_size_feed_forward finetuning_task id2label
                is_decoder is_encoder_decoder label2id output_attentions output_hidden_states
                problem_type return_dict torchscript use_cache""",
        _MEMORY: "attn_implementation _attn_implementation use_flash_attn",
        "`--dtype` sets the data type": "dtype torch_dtype",
        "the chat template writes these tokens, and nothing is padded": """bos_token_id pad_token_id
                vision_token_id""",
        "nothing is padded": "padding_side",
        "the architecture decides whether M-RoPE is interleaved": "mrope_interleaved",
        _SPECULATION: "mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers",
    },
    "config.json: vision_config": {
        _NAMES: "_name_or_path architectures model_type transformers_version",
        _TRAINING: "attention_dropout initializer_range",
        _RETURNED: """chunk_size_feed_forward id2label is_encoder_decoder label2id
                output_attentions output_hidden_states problem_type return_dict""",
        "`--dtype` sets the data type": "dtype torch_dtype",
        "nothing is padded": "pad_token_id",
    },
    "config.json: quantization_config": {
        _NAMES: "meta model_file_base_name model_name_or_path producer quantizer",
        "how the files were made": """act_group_aware autoround_version batch_size
                block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
                dataset enable_quanted_input global_compression_ratio iters low_gpu_mem_usage lr
                max_input_length minmax_lr model_free model_seqlen
                module_name_preceding_first_block mse nsamples pad_token_id quantization_status
                seqlen static_groups tokenizer true_sequential""",
        "the names of the tensors show which modules are quantized": """modules_in_block_to_quantize
                modules_to_convert""",
        _MEMORY: """dequantize do_fuse exllama_config fuse_max_seq_len modules_to_fuse
                run_compressed use_cuda_fp16 use_exllama use_optimized_inference""",
    },
    "generation_config.json": {
        _NAMES: "_commit_hash _from_model_config transformers_version",
        _RETURNED: """num_return_sequences output_attentions output_hidden_states output_logits
                output_scores return_dict_in_generate""",
        _MEMORY: """cache_config cache_implementation compile_config continuous_batching_config
                disable_compile low_memory max_cache_len prefill_chunk_size use_cache""",
        _BEAMS: "diversity_penalty early_stopping length_penalty",
        _SPECULATION: """assistant_confidence_threshold assistant_early_exit
                assistant_ensemble_weight assistant_lookbehind is_assistant
                max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
                prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp""",
        "the chat template writes these tokens, and nothing is padded": """bos_token_id
                decoder_start_token_id pad_token_id""",
        "the model's context limits the length": "max_length",
        "options of chat programs": "chat_format max_window_size",
    },
    "tokenizer_config.json": {
        _NAMES: """auto_map backend is_local name_or_path processor_class special_tokens_map_file
                tokenizer_class tokenizer_file unsloth_version""",
        _PLACES: """add_bos_token add_eos_token add_prefix_space added_tokens_decoder
                additional_special_tokens extra_special_tokens legacy sp_model_kwargs
                split_special_tokens use_fast""",
        "the white space of answers is never changed": """clean_up_tokenization_spaces
                spaces_between_special_tokens""",
        "bytes that are not valid UTF-8 are always replaced": "errors",
        "prompts are neither padded nor truncated": """max_length model_max_length padding_side
                truncation_side""",
        _RETURNED: "model_input_names model_specific_special_tokens stride",
        "config.json has the token ids": """audio_bos_token audio_eos_token audio_token image_token
                video_token vision_bos_token vision_eos_token""",
    },
    "preprocessor_config.json": {
        _NAMES: "auto_map processor_class",
        "the processor has no such option": """crop_size default_to_square do_center_crop do_pad
                feature_extractor_type image_seq_length pad_size""",
        _RETURNED: "data_format device disable_grouping input_data_format return_tensors",
    },
    "video_preprocessor_config.json": {
        _NAMES: "auto_map processor_class",
        "the processor has no such option": """crop_size default_to_square do_center_crop do_pad
                image_processor_type max_duration max_image_size pad_size""",
        _RETURNED: """data_format device input_data_format return_metadata return_tensors
                video_metadata""",
    },
    "processor_config.json": {
        _NAMES: "auto_map processor_class",
        "clips are not served": "video_prompt_prefix video_prompt_suffix",
    },
}
WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    file: {key: reason for reason, keys in reasons.items() for key in keys.split()}
    for file, reasons in _REASONS.items()
}
# Table of keys for each section that is nested in a file.
_SECTIONS = {
    "config.json": {
        "text_config": "config.json",
        "vision_config": "config.json: vision_config",
        "quantization_config": "config.json: quantization_config",
        "compression_config": "config.json: quantization_config",
    },
    "processor_config.json": {
        "image_processor": "preprocessor_config.json",
        "video_processor": "video_preprocessor_config.json",
    },
}


def unknown_keys(directory: Path) -> list[str]:
    """Unknown keys of a checkpoint's files, each as `FILE: KEY`."""
    return [f"{where}: {key}" for where, table, key in _keys(directory) if not is_known(table, key)]


def is_known(table: str, key: str) -> bool:
    """Returns whether the table lists the key, as read or as ignored."""
    return key in READ[table] or key in WITHOUT_EFFECT[table]


def _keys(directory: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the place, the table and the name of each key that is not null."""
    for file in READ:
        path = directory / file
        if not path.exists():
            continue
        sections: list[tuple[str, str, Mapping[str, Any]]] = [(file, file, read_json(path))]
        for name, table in _SECTIONS.get(file, {}).items():
            if isinstance(nested := sections[0][2].get(name), dict):
                sections.append((f"{file}: {name}", table, cast("dict[str, Any]", nested)))
        for where, table, found in sections:
            yield from ((where, table, key) for key, value in found.items() if value is not None)
