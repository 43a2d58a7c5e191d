"""Chat messages with image parts."""

from typing import Any

import pytest
import torch

from paceline.vision.messages import has_images


@pytest.mark.parametrize("prompt", ["a", [1, 2], None, 3, torch.tensor([1, 2]), [{"role": "user", "content": "a"}]])
def test_other_prompts_have_no_images(prompt: Any) -> None:
    assert not has_images(prompt)


def test_a_chat_with_an_image_part_has_images() -> None:
    assert has_images([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
