"""Families that differ from Llama in norms, rotation and order, from GGUFs laid out as by llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from paceline.checkpoints.gguf import open_gguf
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from tests.support.gguf_writing import finish
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text

CASES = {
    "olmo2": "olmo2",
    "olmo3, sliding, stretched": "olmo2",
    "exaone4": "exaone4",
    "exaone4, sliding": "exaone4",
    "glm4": "glm4",
    "ernie4.5": "ernie4_5",
    "qwen3": "qwen3vl",
    "cohere": "command-r",
    "cohere, norms of heads": "command-r",
    "cohere2, sliding": "cohere2",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "stablelm, parallel": "stablelm",
    "phi": "phi2",
    "gpt-neox": "gptneox",
    "gpt-neox, one after the other": "gptneox",
}


def write(path: Path, arch: str, theirs: Any) -> None:
    c, writer = theirs.config, gguf.GGUFWriter(path, arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    if arch != "gptneox":
        writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if eps := getattr(c, "layer_norm_eps", None) or getattr(c, "norm_epsilon", None):
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    if scale := getattr(c, "logit_scale", None):
        writer.add_logit_scale(scale)
    if arch in ("stablelm", "gptneox"):
        # Converters give StableLM's as true where config.json has none, though the default is false.
        writer.add_parallel_residual(arch == "stablelm" or c.use_parallel_residual)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if share := rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(head_dim * share))
    if getattr(c, "sliding_window", None) and "sliding_attention" in c.layer_types:
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    number = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in stacked(theirs):
        stored = table.get_name(name, (".weight", ".bias"))
        assert stored, name
        writer.add_tensor(stored, tensor.float().contiguous().numpy())
    finish(writer)


def stacked(theirs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as the converter has them: norms of heads in one, all queries before all keys and values."""
    norms: dict[str, list[torch.Tensor]] = {}
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and theirs.config.tie_word_embeddings:
            continue
        if "layernorm.norms." in name:
            norms.setdefault(re.sub(r"norms\.\d+\.", "", name), []).append(tensor)
        elif ".query_key_value." in name:
            heads = tensor.unflatten(0, (theirs.config.num_attention_heads, 3, -1))
            yield name, heads.transpose(0, 1).flatten(0, 2)
        else:
            yield name, tensor
    for name, parts in norms.items():
        yield name, torch.stack(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs, _ = models(case)
    write(tmp_path / "m.gguf", CASES[case], theirs)
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))
