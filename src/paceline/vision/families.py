"""The families of models with vision towers."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.vision.family import Tower, VisionFamily
from paceline.vision.lfm2 import TileProcessor
from paceline.vision.prompt import EncodedImage


def _idefics3(tower: Tower, image: Any) -> EncodedImage:
    """Encode an image as tiles in rows and columns, followed by the whole image, or as the whole image only."""
    inputs = tower.processor(images=[[image]], return_tensors="pt", return_row_col_info=True)
    (rows,), (columns,) = inputs.pop("rows")[0], inputs.pop("cols")[0]
    embeddings = torch.cat(tower.model.get_image_features(**inputs, return_dict=True).pooler_output)
    fake, patches = "<fake_token_around_image>", "<image>" * (len(embeddings) // (rows * columns + 1))
    lines = [
        "".join(f"{fake}<row_{row}_col_{column}>{patches}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    tiles = "".join(lines) + "\n" if lines else ""
    return EncodedImage(f"{tiles}{fake}<global-img>{patches}{fake}", embeddings)


def _idefics3_rows(tower: Tower, height: int, width: int) -> int:
    # transformers counts too few patches, unless the longest side is a multiple of a tile's side, as in SmolVLM and
    # Idefics3.
    _, rows, columns = tower.processor.get_number_of_image_patches(height, width)
    patches = tower.processor.max_image_size["longest_edge"] // tower.config.vision_config.patch_size
    found: int = (rows * columns + 1) * (patches // tower.config.scale_factor) ** 2
    return found


def _lfm2(tower: Tower, image: Any) -> EncodedImage:
    """Encode an image as tiles in rows and columns, followed by the whole image, or as the whole image only."""
    inputs, rows, columns = tower.processor(image)
    parts = tower.model.get_image_features(**inputs, return_dict=True).pooler_output
    names = [f"<|img_row_{row}_col_{column}|>" for row in range(1, rows + 1) for column in range(1, columns + 1)]
    names = [*names, "<|img_thumbnail|>"] if len(names) > 1 else [""]
    text = "".join(name + "<image>" * len(part) for name, part in zip(names, parts, strict=False))
    return EncodedImage(f"<|image_start|>{text}<|image_end|>", torch.cat(list(parts)))


def _lfm2_rows(tower: Tower, height: int, width: int) -> int:
    rows: int = tower.processor.rows(height, width)
    return rows


def _gemma3(tower: Tower, image: Any) -> EncodedImage:
    """Encode the whole image, scaled to a square."""
    inputs = tower.processor(images=[image], return_tensors="pt", do_pan_and_scan=False)
    (embeddings,) = tower.model.get_image_features(inputs["pixel_values"]).pooler_output
    text = f"\n\n<start_of_image>{'<image_soft_token>' * len(embeddings)}<end_of_image>\n\n"
    return EncodedImage(text, embeddings, mutual="all")


def _gemma3_rows(tower: Tower, height: int, width: int) -> int:
    rows: int = tower.config.mm_tokens_per_image
    return rows


def _gemma4(tower: Tower, image: Any) -> EncodedImage:
    """Encode an image at its own aspect ratio."""
    inputs = tower.processor(images=[image], return_tensors="pt")
    found = tower.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"], return_dict=True)
    (embeddings,) = found.pooler_output
    mutual = tower.config.get_text_config().use_bidirectional_attention == "vision"
    text = f"<|image>{'<|image|>' * len(embeddings)}<image|>"
    return EncodedImage(text, embeddings, mutual="windows" if mutual else "none")


def _gemma4_rows(tower: Tower, height: int, width: int) -> int:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    own = tower.processor
    most = own.max_soft_tokens * own.pooling_kernel_size**2
    sides = get_aspect_ratio_preserving_size(height, width, own.patch_size, most, own.pooling_kernel_size)
    return math.prod(side // (own.patch_size * own.pooling_kernel_size) for side in sides)


def _qwen(tower: Tower, image: Any) -> EncodedImage:
    """Encode an image at its own aspect ratio, with a position for each row and column of patches."""
    inputs = tower.processor(images=[image], return_tensors="pt")
    found = tower.model.get_image_features(**inputs, return_dict=True)
    (embeddings,), ((time, height, width),) = found.pooler_output, inputs["image_grid_thw"].tolist()
    merged = tower.config.vision_config.spatial_merge_size
    deep = tuple(parts[0] for parts in getattr(found, "deepstack_features", None) or ())
    grid = time, height // merged, width // merged
    return EncodedImage("<|image_pad|>" * len(embeddings), embeddings, deep, grid)


def _qwen_rows(tower: Tower, height: int, width: int) -> int:
    patches: int = tower.processor.get_number_of_image_patches(height, width)
    merged: int = tower.processor.merge_size**2
    return patches // merged


def _qwen_family(kind: str, model: str) -> VisionFamily:
    return VisionFamily(
        kind,
        model,
        processor="Qwen2VLImageProcessorPil",
        language="language_model",
        tensors=("visual.", "model.visual."),
        encode=_qwen,
        rows=_qwen_rows,
        mark="<|image_pad|>",
        token="<|image_pad|>",
    )


_FAMILIES = (
    *(
        VisionFamily(
            kind,
            f"{name}Model",
            processor=f"{name}ImageProcessorPil",
            language="text_model",
            tensors=("model.vision_model.", "model.connector."),
            encode=_idefics3,
            rows=_idefics3_rows,
            mark="<image>",
            token="<image>",
        )
        for kind, name in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))
    ),
    VisionFamily(
        "lfm2_vl",
        "Lfm2VlModel",
        processor=TileProcessor,
        language="language_model",
        tensors=("model.vision_tower.", "model.multi_modal_projector."),
        encode=_lfm2,
        rows=_lfm2_rows,
        mark="<image>",
        token="<image>",
    ),
    VisionFamily(
        "gemma3",
        "Gemma3Model",
        processor="Gemma3ImageProcessorPil",
        language="language_model",
        tensors=tuple(at + part for at in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")),
        encode=_gemma3,
        rows=_gemma3_rows,
        mark="<start_of_image>",
        token="<image_soft_token>",
    ),
    VisionFamily(
        "gemma4",
        "Gemma4Model",
        processor="Gemma4ImageProcessorPil",
        language="language_model",
        tensors=("model.vision_tower.", "model.embed_vision."),
        encode=_gemma4,
        rows=_gemma4_rows,
        mark="<|image|>",
        token="<|image|>",
    ),
    _qwen_family("qwen2_vl", "Qwen2VLModel"),
    _qwen_family("qwen2_5_vl", "Qwen2_5_VLModel"),
    _qwen_family("qwen3_vl", "Qwen3VLModel"),
    _qwen_family("qwen3_5", "Qwen3_5Model"),
)
VISION: dict[str, VisionFamily] = {family.name: family for family in _FAMILIES}
"""Family by `model_type`."""
