"""Families that differ from Llama in norms and rotation, from GGUF files laid out as llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from paceline.checkpoints.gguf import open_gguf
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from tests.gguf_writing import finish
from tests.models.test_families import assert_close, expected, feed, models, text

CASES = {
    "olmo2": "olmo2",
    "olmo3, sliding, stretched": "olmo2",
    "exaone4": "exaone4",
    "exaone4, sliding": "exaone4",
    "glm4": "glm4",
    "ernie4.5": "ernie4_5",
    "qwen3": "qwen3vl",
}


def write(path: Path, arch: str, theirs: Any) -> None:
    c, writer = theirs.config, gguf.GGUFWriter(path, arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "glm4":
        writer.add_rope_dimension_count(head_dim // 2)
    if getattr(c, "sliding_window", None) and "sliding_attention" in c.layer_types:
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    number = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        stored = table.get_name(name, (".weight", ".bias"))
        assert stored
        writer.add_tensor(stored, tensor.float().contiguous().numpy())
    finish(writer)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs, _ = models(case)
    write(tmp_path / "m.gguf", CASES[case], theirs)
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))
