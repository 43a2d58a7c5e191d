"""The families of models that see."""

from __future__ import annotations

from typing import Any

import torch

from paceline.vision.family import Tower, VisionFamily
from paceline.vision.prompt import EncodedImage


def _idefics3(tower: Tower, image: Any) -> EncodedImage:
    """Encode an image, as tiles in rows and columns followed by the whole image, or as the whole image only."""
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


_IDEFICS3 = VisionFamily(
    types=("idefics3",),
    model="Idefics3Model",
    processor="Idefics3ImageProcessorPil",
    language="text_model",
    encode=_idefics3,
    mark="<image>",
    token="<image>",
    tensors=("model.vision_model.", "model.connector."),
)

VISION: dict[str, VisionFamily] = {
    kind: family
    for family in (
        _IDEFICS3,
        VisionFamily(
            types=("smolvlm",),
            model="SmolVLMModel",
            processor="SmolVLMImageProcessorPil",
            language="text_model",
            encode=_idefics3,
            mark="<image>",
            token="<image>",
            tensors=("model.vision_model.", "model.connector."),
        ),
    )
    for kind in family.types
}
"""Family by `model_type`."""
