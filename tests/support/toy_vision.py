"""A random toy that sees: images become rows that depend on their pixels."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
import torch

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.text.tokenizer import Tokenizer
from paceline.vision.encoder import Vision
from paceline.vision.family import VisionFamily
from paceline.vision.picture import Picture
from paceline.vision.prompt import EncodedImage
from tests.support.vocabularies import byte_level, speaker

ROWS = 4
"""Rows of each image."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ToyVision(Vision):
    """A tower without weights. Counts the images that it encodes."""

    def __init__(self, hidden: int) -> None:
        unused = {"model": "", "processor": "", "language": "", "tensors": (), "encode": None}
        family = VisionFamily(name="toy", mark="<image>", token="<image>", **unused)  # type: ignore[arg-type]
        super().__init__(family, {}, dict, {}, torch.float64, torch.device("cpu"))
        self.hidden, self.pictures = hidden, list[Picture]()

    def _encode(self, picture: Picture) -> EncodedImage:
        self.pictures.append(picture)
        rows = torch.Generator().manual_seed(int(picture.digest[:15], 16))
        embeddings = torch.randn(ROWS, self.hidden, generator=rows, dtype=torch.float64)
        return EncodedImage("<image>" * ROWS, embeddings)


def seeing_llm(template: str = TEMPLATE) -> LLM:
    """Return the toy."""
    words = byte_level()
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    backend.add_special_tokens(["<image>"])
    model = speaker(Tokenizer(backend, words.special_tokens, template), seed=3)
    hidden = model.target.config.hidden  # type: ignore[attr-defined]
    return LLM(replace(model, vision=ToyVision(hidden)), {"suffix": Suffix()})
