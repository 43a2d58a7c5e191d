"""Vision models, compared with transformers at every position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import paceline
from paceline import LLM, Sampling
from paceline.engine.draft_policy import Speculation
from paceline.types import Forward, Want
from paceline.vision.messages import split_images
from tests.support.cover import some
from tests.support.seeing import SEEING, chat, picture, reference, write_seeing

_PICTURES = (picture(40, 70, 1), picture(20, 20, 2), picture(64, 30, 3))


class _Logits:
    """Collects the logits of a prompt."""

    want: ClassVar[Want] = Want("all")

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        self.parts.append(out.logits[0, : len(following)])


def logits(llm: LLM, ids: Sequence[int], chunk: int = 256) -> Tensor:
    """Return our logits [T - 1, V] of a prompt that is read in chunks."""
    reader = _Logits()
    request = llm.start(ids, Sampling(max_new_tokens=1), scores=reader)
    while llm.engine.feed(request, chunk):
        pass
    llm.engine.finish(request)
    return torch.cat(reader.parts)


_FAST = ("smolvlm", "gemma3", "qwen3_vl")
_KINDS = [kind if kind in _FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in SEEING]


@pytest.fixture(scope="module", params=_KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_seeing(folder, request.param)
    return request.param, model, folder, paceline.load(folder, dtype="float32", drafter=None)


Seen = tuple[str, Any, Path, LLM]


@some("count", [1, 3], fast=["3"])
def test_logits_of_every_position_are_those_of_transformers(seen: Seen, count: int) -> None:
    kind, model, folder, llm = seen
    pictures = _PICTURES[:count]
    ids = llm.encode(chat("Look at ", *[x for one in pictures for x in (one, " and then ")], "what is it?"))
    theirs = reference(kind, model, folder, ids, pictures)
    ours = logits(llm, ids)
    assert torch.allclose(ours, theirs[: len(ours)], atol=2e-3), (ours - theirs[: len(ours)]).abs().amax(1)


_SIZES = ((40, 70), (20, 20), (64, 30), (200, 30), (30, 200), (97, 83), (33, 32), (32, 33), (8, 90))


def test_the_size_of_an_image_tells_its_rows(seen: Seen) -> None:
    vision = seen[3].vision
    assert vision
    pictures = [picture(width, height) for width, height in _SIZES]
    assert [vision.rows(one) for one in pictures] == [len(vision.encode(one).embeddings) for one in pictures]


def _text(llm: LLM, prompt: Any, **options: Any) -> tuple[int, ...]:
    return tuple(llm.generate(prompt, max_new_tokens=24, temperature=0.7, seed=3, ignore_eos=True, **options).token_ids)


def _prompt(first: int = 1, tail: int = 4) -> Any:
    """Return a chat with two pictures and a tail of text. The first picture depends on `first`."""
    return chat("Look at ", picture(40, 70, first), " and ", picture(20, 20, 2), " a b" * tail)


def _tail(kind: str) -> int:
    """Return a tail length that gives prompts common prefixes to share. Some models share only whole chunks."""
    return 80 if kind.startswith(("qwen3_5", "gemma4", "lfm2")) else 4


@some("chunk", [1, 5, 7], fast=["5"])
def test_chunks_that_cut_images_change_no_logits(seen: Seen, chunk: int) -> None:
    llm = seen[3]
    ids = llm.encode(_prompt())
    assert torch.allclose(logits(llm, ids, chunk), logits(llm, ids), atol=1e-3)


def test_drafts_batches_and_prefix_hits_do_not_change_the_text(seen: Seen) -> None:
    kind, _, folder, plain = seen
    tail = _tail(kind)
    prompts = [_prompt(1, tail), _prompt(4, tail), chat("a b a b a b a b")]
    expected = [_text(plain, prompt) for prompt in prompts]
    assert not torch.equal(*(logits(plain, plain.encode(prompt))[-1] for prompt in prompts[:2]))
    llm = paceline.load(folder, dtype="float32", drafter=["suffix", "early-exit:1"], draft=5)
    together = llm.generate(prompts, max_new_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
    assert [tuple(one.token_ids) for one in together] == expected
    assert any(one.stats.drafted for one in together)
    llm.engine.remember(1 << 26)
    for policy in llm.engine.policies:
        for _ in range(2):  # the second time from the prefix cache
            llm.engine.policies.default = Speculation(policy.name)
            assert [_text(llm, prompt) for prompt in prompts] == expected
    assert llm.engine.prefixes.hits > 0


def test_two_images_never_share_a_prefix(seen: Seen) -> None:
    kind, _, folder, plain = seen
    tail = _tail(kind)
    llm = paceline.load(folder, dtype="float32", drafter=None)
    llm.engine.remember(1 << 26)
    first = llm.encode(_prompt(1)).images[0].rows[0]
    for seed in (1, 4, 1):
        reply = llm.generate(_prompt(seed, tail), max_new_tokens=8, temperature=0)
        assert reply.token_ids == plain.generate(_prompt(seed, tail), max_new_tokens=8, temperature=0).token_ids
        if seed == 4:
            assert reply.stats.cached <= first, "only the text before the image is shared"
    assert reply.stats.cached > first


@pytest.mark.parametrize("seen", ["gemma3", "gemma4, bidirectional"], indirect=True)
def test_an_image_may_cross_the_end_of_a_ring(seen: Seen) -> None:
    kind, model, folder, llm = seen
    before = llm.encode(chat("x", _PICTURES[0])).images[0].rows[0]
    ids = llm.encode(chat("x" * (509 - before), _PICTURES[0], " and then?"))
    assert ids.images[0].rows[0] < 512 < ids.images[0].rows[-1]
    theirs = reference(kind, model, folder, ids, _PICTURES[:1])
    ours = logits(llm, ids)
    assert torch.allclose(ours, theirs[: len(ours)], atol=2e-3)


@pytest.mark.parametrize("seen", ["idefics3", "gemma3"], indirect=True)
def test_the_text_around_images_is_that_of_transformers_processors(seen: Seen) -> None:
    kind, _, folder, llm = seen
    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=marks if kind == "gemma3" else {}
    )
    name = {"idefics3": "Idefics3", "gemma3": "Gemma3"}[kind]
    images = getattr(transformers, f"{name}ImageProcessorPil").from_pretrained(folder)
    length = {"idefics3": {"image_seq_len": 4}, "gemma3": {"image_seq_length": 9}}[kind]
    processor = getattr(transformers, f"{name}Processor")(images, words, **length)
    for shown in _PICTURES:
        given = chat("Look at ", shown, "what is it?")
        text = llm.tokenizer.apply_chat_template(split_images(given)[0]).plain()
        theirs = processor(text=text, images=[Image.fromarray(shown.pixels)], add_special_tokens=False)
        assert llm.encode(given) == theirs["input_ids"][0]
