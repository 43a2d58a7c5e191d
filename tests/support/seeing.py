"""Tiny random vision models, made by transformers, and pictures for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken
from torch import Tensor

from paceline.types import Message
from paceline.vision.lfm2 import TileProcessor
from paceline.vision.picture import Picture
from tests.support.vocabularies import byte_level

_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_TILES = [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
_SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "initializer_range": 0.3,
}
_QWEN = {"min_pixels": 16 * 16, "max_pixels": 96 * 96, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_INTERLEAVED = {**_MROPE, "mrope_interleaved": True}
_QWEN_VISION = {
    "depth": 3,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
    "in_channels": 3,
}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
_SMOL = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The template of SmolVLM, which renders only content that is a list of parts."""


@dataclass(frozen=True)
class Seeing:
    """Parameters for a tiny model of a family.

    Attributes:
        model: Name of transformers' class.
        config: Config without the sizes of the text model.
        tokens: Special tokens.
        token: Config key of the placeholder token.
        processor: Name of transformers' class of the image processor.
        settings: Its settings.
        template: The chat template.
        text: Additional keys of the text config.
    """

    model: str
    config: Mapping[str, Any]
    tokens: Sequence[str]
    processor: str
    settings: Mapping[str, Any]
    template: str
    text: Mapping[str, Any]
    token: str = "image_token_id"


def _idefics(name: str) -> Seeing:
    return Seeing(
        f"{name}ForConditionalGeneration",
        {"vision_config": {**_SIGLIP, "image_size": 32}, "scale_factor": 2},
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>", *_TILES],
        f"{name}ImageProcessorPil",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        _SMOL,
        {"model_type": "llama"},
    )


def _qwen(model: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Seeing:
    return Seeing(
        model,
        {"vision_config": vision},
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        "Qwen2VLImageProcessorPil",
        _QWEN,
        _PARTS.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"),
        text,
    )


def _gemma4(bidirectional: str | None) -> Seeing:
    return Seeing(
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": {
                **_SIGLIP,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
        ["<|image|>", "<|image>", "<image|>"],
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        _PARTS.replace("MARK", "<|image|>"),
        {
            "model_type": "gemma4_text",
            "sliding_window": 96,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 2,
            "use_bidirectional_attention": bidirectional,
        },
    )


SEEING: dict[str, Seeing] = {
    "smolvlm": _idefics("SmolVLM"),
    "idefics3": _idefics("Idefics3"),
    "lfm2_vl": Seeing(
        "Lfm2VlForConditionalGeneration",
        {
            "vision_config": {
                **_SIGLIP,
                "model_type": "siglip2_vision_model",
                "num_patches": 16,
                "vision_use_head": False,
            },
            "projector_hidden_size": 40,
        },
        ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *(f"<|img_{x[1:-1]}|>" for x in _TILES)],
        "",
        {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 2, "max_image_tokens": 6, "max_tiles": 4},
        _PARTS.replace("MARK", "<image>"),
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 48,
        },
    ),
    "gemma3": Seeing(
        "Gemma3ForConditionalGeneration",
        {"vision_config": {**_SIGLIP, "image_size": 48}, "mm_tokens_per_image": 9},
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "Gemma3ImageProcessorPil",
        {"size": {"height": 48, "width": 48}, "image_seq_length": 9},
        _PARTS.replace("MARK", "<start_of_image>"),
        {
            "model_type": "gemma3_text",
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
        "image_token_index",
    ),
    "gemma4": _gemma4(None),
    "gemma4, bidirectional": _gemma4("vision"),
    "qwen2_vl": _qwen(
        "Qwen2VLForConditionalGeneration",
        {"model_type": "qwen2_vl_text", "rope_parameters": _MROPE, "hidden_size": 64},
        {**_QWEN_VISION, "embed_dim": 24, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLForConditionalGeneration",
        {"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE, "hidden_size": 64},
        {
            **_QWEN_VISION,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 32,
        },
    ),
    "qwen3_vl": _qwen(
        "Qwen3VLForConditionalGeneration",
        {"model_type": "qwen3_vl_text", "rope_parameters": _INTERLEAVED},
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_5": _qwen(
        "Qwen3_5ForConditionalGeneration",
        {
            "model_type": "qwen3_5_text",
            "rope_parameters": {**_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
        },
        _QWEN3_VISION,
    ),
}
"""Tiny models by `model_type`."""


def write_seeing(folder: Path, kind: str, **text: Any) -> Any:
    """Write a tiny random model with tokenizer, template and image processor. Return transformers' model."""
    one, words = SEEING[kind], byte_level()
    kind = kind.partition(",")[0]
    backend = words._backend
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in one.tokens])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "</s>", "chat_template": one.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    sizes = {"vocab_size": backend.get_vocab_size(), "bos_token_id": None, "eos_token_id": words.eos_token_id}
    own = {**_TEXT, **one.text, **sizes, **text}
    if "hidden_size_per_layer_input" in own:
        own["vocab_size_per_layer_input"] = own["vocab_size"]
    about = {one.token: backend.token_to_id(one.tokens[0]), "tie_word_embeddings": False}
    if kind.startswith("qwen"):
        about |= {
            name: backend.token_to_id(f"<|{name[:-9]}|>") for name in ("vision_start_token_id", "vision_end_token_id")
        }
        about["video_token_id"] = backend.token_to_id("<|video_pad|>")
    config = transformers.AutoConfig.for_model(kind, text_config=own, **one.config, **about)
    torch.manual_seed(0)
    model = getattr(transformers, one.model)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embedding.weight") or "pos_embed" in name or "mm_input_projection" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    if one.processor:
        getattr(transformers, one.processor)(**one.settings).save_pretrained(folder)
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(one.settings))
    return model


def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Return a picture of random pixels."""
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def chat(*contents: str | Picture) -> list[Message]:
    """Return a chat with one message of these parts."""
    parts = [{"type": "text", "text": x} if isinstance(x, str) else {"type": "image", "image": x} for x in contents]
    return [{"role": "user", "content": parts}]


def reference(kind: str, model: Any, folder: Path, ids: Sequence[int], pictures: Sequence[Picture]) -> Tensor:
    """Return transformers' logits [T, V] of a prompt."""
    from PIL import Image

    images = [Image.fromarray(one.pixels) for one in pictures]
    if kind == "lfm2_vl":
        return _lfm2_logits(model, folder, ids, images)
    processor = getattr(transformers, SEEING[kind].processor).from_pretrained(folder)
    nested: Callable[[Any], Any] = (lambda x: [x]) if kind in ("smolvlm", "idefics3") else lambda x: x
    inputs = processor(images=nested(images), return_tensors="pt") if images else {}
    inputs = {key: value for key, value in inputs.items() if key not in ("rows", "cols", "num_crops")}
    tokens = torch.tensor([list(ids)])
    shown = (tokens == getattr(model.config, SEEING[kind].token)).long()
    if kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = shown
    elif kind.startswith("gemma4"):
        inputs = {key: value for key, value in inputs.items() if key != "num_soft_tokens_per_image"}
        inputs["mm_token_type_ids"] = shown
    elif kind.startswith("gemma3"):
        inputs["token_type_ids"] = shown
    with torch.inference_mode():
        return model(input_ids=tokens, **inputs).logits[0]


def _lfm2_logits(model: Any, folder: Path, ids: Sequence[int], images: Sequence[Any]) -> Tensor:
    """See `reference`. transformers' processor would need torchvision, so this uses ours."""
    process = TileProcessor(folder)
    found = [process(image)[0] for image in images]
    most = max(one["pixel_values"].shape[1] for one in found)
    joined: dict[str, Tensor] = {"spatial_shapes": torch.cat([one["spatial_shapes"] for one in found])}
    for key in ("pixel_values", "pixel_attention_mask"):
        parts = [one[key] for one in found]
        widths = [(0, 0) * (part.dim() - 2) + (0, most - part.shape[1]) for part in parts]
        joined[key] = torch.cat([F.pad(part, width) for part, width in zip(parts, widths, strict=True)])
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), **joined).logits[0]
    return logits
