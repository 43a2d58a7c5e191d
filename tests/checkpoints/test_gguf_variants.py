"""Families that differ from Llama in norms, rotation and order, from GGUFs laid out as by llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.model_config import read_config
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import config_fields, rope_scaling_fields, stored_name, write_file
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text

CASES = {
    "olmo2": "olmo2",
    "olmo3, sliding, stretched": "olmo2",
    "exaone4": "exaone4",
    "exaone4, sliding": "exaone4",
    "glm4": "glm4",
    "hunyuan": "hunyuan-dense",
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
    c = theirs.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    fields = config_fields(c) | rope_scaling_fields(rope)
    fields |= dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    fields["logit_scale"] = getattr(c, "logit_scale", None)
    if eps := getattr(c, "layer_norm_eps", None) or getattr(c, "norm_epsilon", None):
        fields |= {"attention.layer_norm_epsilon": eps, "attention.layer_norm_rms_epsilon": None}
    if arch == "gptneox":
        fields["attention.head_count_kv"] = None
    if arch in ("stablelm", "gptneox"):
        # Converters give StableLM's as true where config.json has none, though the default is false.
        fields["use_parallel_residual"] = arch == "stablelm" or c.use_parallel_residual
    if share := rope.get("partial_rotary_factor"):
        fields["rope.dimension_count"] = int(head_dim * share)
    if getattr(c, "sliding_window", None) and "sliding_attention" in c.layer_types:
        fields["attention.sliding_window"] = c.sliding_window
        fields["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c.layer_types]
    write_file(path, arch, fields, ((stored_name(arch, name), tensor) for name, tensor in stacked(theirs)))


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
