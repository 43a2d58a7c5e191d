"""Names of request fields that other local servers accept, from their public sources and documentation of August to
October 2026. Fields of OpenAI's own API are listed if a server documents them."""

from __future__ import annotations

OPENAI = (
    "messages model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop "
    "stream stream_options temperature top_p user"
)

CHAT: dict[str, str] = {
    # tools/server/server-schema.cpp, and oaicompat_chat_params_parse in server-common.cpp
    "llama.cpp": f"{OPENAI} tools tool_choice parallel_tool_calls max_completion_tokens n_predict n_indent n_keep "
    "n_discard n_cmpl n_cache_reuse cache_prompt id_slot verbose timings_per_token return_tokens return_progress "
    "sse_ping_interval t_max_predict_ms top_k min_p top_n_sigma xtc_probability xtc_threshold typical_p dynatemp_range "
    "dynatemp_exponent repeat_last_n repeat_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay n_probs min_keep "
    "backend_sampling post_sampling_probs lora json_schema grammar grammar_type grammar_lazy grammar_triggers "
    "preserved_tokens chat_format chat_parser generation_prompt parse_tool_calls continue_final_message "
    "add_generation_prompt echo reasoning_format reasoning_control reasoning_budget_tokens reasoning_budget_start_tag "
    "reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message thinking_budget_tokens ignore_eos "
    "samplers penalize_nl chat_template_kwargs speculative.n_max speculative.n_min speculative.p_min speculative.type "
    "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits",
    # vllm/entrypoints/openai/chat_completion/protocol.py, and the guided_* fields of versions before 0.12
    "vLLM": f"{OPENAI} top_logprobs max_completion_tokens tools tool_choice reasoning_effort thinking_token_budget "
    "include_reasoning parallel_tool_calls use_beam_search top_k min_p repetition_penalty watermarking length_penalty "
    "stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo "
    "add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs "
    "media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids "
    "return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval guided_json guided_regex "
    "guided_choice guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern logits_processors "
    "best_of early_stopping",
    # python/sglang/srt/entrypoints/openai/protocol.py
    "SGLang": f"{OPENAI} top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_hidden_states "
    "return_routed_experts routed_experts_start_len return_cached_tokens_details return_prompt_token_ids "
    "return_token_ids return_meta_info reasoning reasoning_effort task top_k min_p min_tokens regex ebnf "
    "repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens "
    "lora_path session_id session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch "
    "min_dynamic_patch use_audio_in_video images_config custom_logit_processor custom_params input_ids rid extra_key "
    "cache_salt ngram_corpus_id priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
    "disagg_prefill_dp_rank data_parallel_rank",
    # openai/openai.go
    "Ollama": f"{OPENAI} top_logprobs tools reasoning reasoning_effort _debug_render_only",
    # lmstudio.ai/docs: OpenAI compatibility, TTL, speculative decoding, structured output
    "LM Studio": f"{OPENAI} tools tool_choice top_k repeat_penalty ttl draft_model reasoning",
    # openrouter.ai/docs, and other providers' names for fields that control reasoning
    "OpenRouter and others": "provider route transforms plugins usage include_reasoning enable_thinking think thinking "
    "thinking_budget reasoning_budget keep_alive options",
}
"""Of /v1/chat/completions."""

COMPLETION: dict[str, str] = {
    "vLLM": "prompt echo suffix prompt_embeds add_special_tokens response_format structured_outputs logprobs",
    "SGLang": "custom_labels prompt best_of echo suffix json_schema regex ebnf response_format logprobs",
    "Ollama": "prompt suffix logprobs",
}
"""Fields of /v1/completions. It also accepts all chat fields that are not specific to chats."""

OLLAMA: dict[str, str] = {
    # api/types.go: ChatRequest, GenerateRequest, and Options including earlier versions
    "/api/chat": "model messages stream format keep_alive tools options think truncate shift logprobs top_logprobs",
    "/api/generate": "model prompt suffix system template context stream raw format keep_alive images options think "
    "truncate shift logprobs top_logprobs width height steps",
    "options": "num_keep seed num_predict top_k top_p min_p typical_p repeat_last_n temperature repeat_penalty "
    "presence_penalty frequency_penalty stop num_ctx num_batch num_gpu main_gpu use_mmap num_thread draft_num_predict "
    "tfs_z mirostat mirostat_tau mirostat_eta penalize_newline numa low_vram f16_kv vocab_only use_mlock logits_all "
    "embedding_only",
}
"""Fields of Ollama's own API, by path or parent field."""
