"""Chat messages with image parts."""

from typing import Any

import pytest
import torch

from paceline.errors import InvalidPrompt
from paceline.vision.messages import has_images
from tests.support.toys import toy_llm


@pytest.mark.parametrize("prompt", ["a", [1, 2], None, 3, torch.tensor([1, 2]), [{"role": "user", "content": "a"}]])
def test_other_prompts_have_no_images(prompt: Any) -> None:
    assert not has_images(prompt)


def test_a_model_that_reads_text_only_is_named() -> None:
    chat = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]}]
    llm = toy_llm()
    name = llm.model.path.name
    for encode in (llm.encode, llm.generate, lambda prompt: llm.generate([prompt])):
        with pytest.raises(InvalidPrompt, match=f"{name} reads text only.*Use a model that accepts images"):
            encode(chat)


def test_a_chat_with_an_image_part_has_images() -> None:
    assert has_images([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
