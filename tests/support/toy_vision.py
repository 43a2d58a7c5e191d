"""A random toy with image input. Images become rows that depend on their pixels."""

from __future__ import annotations

import zlib
from dataclasses import replace

import tokenizers
import torch
from PIL import Image

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.text.tokenizer import Tokenizer
from paceline.vision.encoder import Vision
from paceline.vision.family import Tower, VisionFamily
from paceline.vision.prompt import EncodedImage
from tests.support.vocabularies import byte_level, speaker

ROWS = 4
"""Number of rows per image."""
TOO_NARROW = (1, 50)
"""Width and height of images that the tower cannot encode."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ToyVision(Vision):
    """A tower without weights. Counts the images that it encodes."""

    def __init__(self, hidden: int) -> None:
        unused = {"model": "", "processor": "", "language": "", "tensors": ()}
        family = VisionFamily("toy", mark="<image>", token="<image>", encode=self._rows, rows=lambda *_: ROWS, **unused)  # type: ignore[arg-type]
        super().__init__(family, {}, dict, {}, torch.float64, torch.device("cpu"))
        self.hidden, self.sizes = hidden, list[tuple[int, int]]()
        self._tower = Tower(None, None, None)

    def _rows(self, _: Tower, image: Image.Image) -> EncodedImage:
        self.sizes.append(image.size)
        if image.size == TOO_NARROW:
            raise IndexError("index out of range")
        rows = torch.Generator().manual_seed(zlib.crc32(image.tobytes()))
        embeddings = torch.randn(ROWS, self.hidden, generator=rows, dtype=torch.float64)
        return EncodedImage("<image>" * ROWS, embeddings)


def seeing_llm(template: str = TEMPLATE) -> LLM:
    """Return the toy with image input."""
    words = byte_level()
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    backend.add_special_tokens(["<image>"])
    model = speaker(Tokenizer(backend, words.special_tokens, template), seed=3)
    hidden = model.target.config.hidden  # type: ignore[attr-defined]
    return LLM(replace(model, vision=ToyVision(hidden)), {"suffix": Suffix()})
