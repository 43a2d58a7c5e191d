"""The language models of vision models, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoints.checkpoint import open_folder
from paceline.checkpoints.model_config import read_config
from paceline.models.decoder import Decoder
from tests.support.lazy import transformers
from tests.support.logits import assert_close, expected, feed, text
from tests.support.tiny_families import SIZES

MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 5e6}
VISION = {"hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 48}
LLAMA4_VISION = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128},
    **{
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "image_size": 28,
        "patch_size": 14,
    },
}
LLAMA4 = {
    **{"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 80, "num_local_experts": 5},
    **{"attention_chunk_size": 4096, "floor_scale": 7},
}


def test_qwen3_vl_writes_the_same_text_as_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = transformers.Qwen3VLTextConfig(**SIZES, head_dim=16, rope_parameters=MROPE)
    seeing = transformers.Qwen3VLVisionConfig(**VISION, deepstack_visual_indexes=[0], num_position_embeddings=16)
    whole = transformers.Qwen3VLConfig(text_config=own, vision_config=seeing, tie_word_embeddings=False)
    theirs = transformers.Qwen3VLForConditionalGeneration(whole).double().eval()
    theirs.save_pretrained(tmp_path)
    config, tensors = open_folder(tmp_path)
    assert config["model_type"] == "qwen3_vl_text"
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(60)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


def test_llama4_writes_the_same_text_as_transformers(tmp_path: Path) -> None:
    """Its stacked experts have the input dimension first."""
    torch.manual_seed(0)
    own = transformers.Llama4TextConfig(**SIZES | LLAMA4)
    whole = transformers.Llama4Config(text_config=own, vision_config=transformers.Llama4VisionConfig(**LLAMA4_VISION))
    theirs = transformers.Llama4ForConditionalGeneration(whole).double().eval()
    theirs.save_pretrained(tmp_path)
    config, tensors = open_folder(tmp_path)
    assert config["model_type"] == "llama4_text"
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(60)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))
