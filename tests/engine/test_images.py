"""Prompts with images in the engine: with every drafter, in batches, with the prefix cache, and after suspension."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.engine.engine import Engine
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.models.config import RopeConfig
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors
from paceline.testing.tiny import run, run_together, start
from paceline.types import DraftBudget
from paceline.vision.prompt import EncodedImage, ImagePrompt, PlacedImage
from tests.support.cover import some
from tests.support.every_drafter import EVERY, KINDS, small

_PLACEHOLDER = 3
_TREE = DraftBudget(6, 3, 2)
_SAMPLING = Sampling(temperature=0.8, seed=5, max_new_tokens=12, ignore_eos=True)
_AXES = RopeConfig(axes=(0, 1, 2, 1))
_KINDS = {**KINDS, "m-rope": lambda seed: small(TINY, random_tensors(TINY, seed), rope=_AXES)}


def image(seed: int, rows: int = 6, **how: object) -> EncodedImage:
    """Return an image of random embeddings."""
    generator = torch.Generator().manual_seed(seed)
    return EncodedImage("", torch.randn(rows, 32, generator=generator, dtype=torch.float64), **how)  # type: ignore[arg-type]


def prompt(*images: EncodedImage, tail: int = 5) -> ImagePrompt:
    """Return a prompt that alternates text and images."""
    tokens, placed = [1, 2, 0, 4], list[PlacedImage]()
    for number, one in enumerate(images):
        first = len(tokens)
        tokens += [_PLACEHOLDER] * len(one.embeddings) + [number % 3, 2, 4]
        placed.append(PlacedImage(one, range(first, first + len(one.embeddings))))
    return ImagePrompt(tokens + [0, 1, 2, 0, 1, 2, 0, 1][:tail], placed)


def _seamless(target: Decoder) -> Engine:
    """Return an engine that can split prompts anywhere, as with the CPU kernels."""
    engine = Engine(target)
    engine.chunk_invariant = True
    return engine


def _image_of(kind: str, seed: int) -> EncodedImage:
    if kind == "m-rope":
        return image(seed, grid=(1, 2, 3), deep=(0.3 * image(seed + 10).embeddings,))
    return image(seed, mutual={"attention": "all", "window": "windows"}.get(kind, "none"))


@some("name", [*EVERY], fast=["suffix", "eagle-3", "mtp", "block", "early exit"])
@some("kind", [*_KINDS], fast=["attention", "m-rope", "gated deltanet"])
def test_a_drafter_does_not_change_the_text_after_images(kind: str, name: str) -> None:
    target = _KINDS[kind](1)
    given = prompt(_image_of(kind, 1), _image_of(kind, 2))
    expected, _, _ = run(target, given, _SAMPLING)
    text, _, stats = run(target, given, _SAMPLING, EVERY[name](target), _TREE)
    assert text == expected
    assert stats.drafted


def test_a_head_reads_the_embeddings_of_images() -> None:
    target = KINDS["attention"](1)
    drafters = [EVERY["eagle-3"](target) for _ in range(2)]
    plain = prompt(image(1))
    blind = ImagePrompt(plain, [])
    states = []
    for drafter, text in zip(drafters, (plain, blind), strict=True):
        engine = Engine(target, drafter, _TREE)
        request = start(engine, plain, _SAMPLING, (), None)
        drafter.release(request.slot)
        drafter.admit(request.slot, text)
        engine.prefill(request)
        engine.step([request])
        states.append(drafter.save(request.slot))
        engine.finish(request)
    assert not torch.equal(*(state.tensors[0] for state in states if state))


@pytest.mark.parametrize("kind", ["attention", "m-rope"])
def test_batches_copies_and_suspensions_do_not_change_the_text(kind: str) -> None:
    target = _KINDS[kind](1)
    prompts = [prompt(_image_of(kind, seed), _image_of(kind, 9)) for seed in (1, 2)] + [[1, 2, 0, 4]]
    expected = [run(target, one, _SAMPLING)[0] for one in prompts]
    engine = Engine(target)
    assert [text for text, *_ in run_together(engine, prompts, [_SAMPLING] * 3)] == expected
    tasks = [Task(partial(start, engine, prompts[0], _SAMPLING, ()), prompts[0], group=0) for _ in range(2)]
    for _ in Batch(engine, tasks, 2):
        pass
    assert [task.request.token_ids[len(prompts[0]) :] for task in tasks if task.request] == [expected[0]] * 2
    request = start(engine, prompts[0], _SAMPLING, (), None)
    engine.prefill(request)
    for _ in range(3):
        engine.step([request])
    engine.suspend(request)
    engine.resume(request)
    engine.prefill(request)
    while not request.finish:
        engine.step([request])
    assert request.token_ids[len(prompts[0]) :] == expected[0]


@pytest.mark.parametrize("kind", ["attention", "m-rope"])
def test_images_share_a_prefix_only_if_their_inputs_are_equal(kind: str, tmp_path: Path) -> None:
    target = _KINDS[kind](1)
    one, two = (prompt(_image_of(kind, seed), _image_of(kind, 9)) for seed in (1, 2))
    expected = [run(target, given, _SAMPLING)[0] for given in (one, two)]
    for _ in range(2):  # the second engine reads the folder
        engine = _seamless(target)
        engine.remember(1 << 24, tmp_path, 1 << 30)
        cached = []
        for given, text in ((one, expected[0]), (two, expected[1]), (one, expected[0])):
            found, _, stats = run(target, given, _SAMPLING, engine=engine)
            assert found == text
            cached.append(stats.cached)
        engine.save_prefixes(10)
    assert cached[0] > 16, "found in the folder"
    assert cached[2] > 16


def test_a_prefix_that_ends_in_an_image_whose_rows_see_each_other_is_shortened() -> None:
    target = KINDS["attention"](1)
    given = prompt(image(1, mutual="all"), image(2, mutual="all"))
    engine = _seamless(target)
    request = start(engine, given, _SAMPLING, (), None)
    fed = []
    while count := engine.feed(request, 3):
        fed.append(count)
    assert fed == [3, 1, 6, 3, 6, 3, 3, 1]
    assert [given.without_partial_image(length) for length in (3, 4, 5, 9, 10, 11)] == [3, 4, 4, 4, 10, 11]
