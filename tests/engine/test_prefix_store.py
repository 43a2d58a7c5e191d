"""Cached prefixes on disk: the text is the same after a restart, and damaged files are ignored."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.cross import SharedTokenDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.vocab_map import VocabMap
from paceline.engine import prefix_file
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.prefix_key import drafter_key, target_key
from paceline.engine.prefix_store import PrefixStore
from paceline.errors import InvalidOption
from paceline.kernels.cpu.build import library
from paceline.models.config import RopeConfig
from paceline.models.decoder import Decoder
from paceline.protocols import Saved
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run
from paceline.types import DraftBudget
from paceline.verify.tree import PREFILL_ROWS
from tests.support.cached_engine import CachedEngine, begun
from tests.support.cover import some
from tests.support.golden import decoder
from tests.support.hybrids import tiny_hybrid, tiny_mamba
from tests.support.native_models import BASE, native
from tests.support.plain import plain_text
from tests.support.tiny_heads import TINY_BLOCK, block_tensors, eagle_config, eagle_tensors
from tests.support.toys import toy_foreigner, toy_model, toy_target

PLENTY = 1 << 30
SAMPLING = Sampling(max_new_tokens=12, temperature=0.9, seed=4, ignore_eos=True)
PROMPT = [(i * i + i // 7) % 29 for i in range(300)]


class Windowed(Decoder):
    """A model in which one layer sees five positions, and the other all positions."""

    def new_cache(self) -> SlabCache:
        layers = [LayerAttention(8**-0.5, window=5), LayerAttention(8**-0.5)]
        return SlabCache(layers, 2, 8, 4096, self.dtype, self.device)


def windowed() -> Decoder:
    return Windowed(replace(TINY, context_length=4096), random_tensors(TINY), torch.float64, torch.device("cpu"))


def turned() -> Decoder:
    """Return a model with rotary factors that depend on the length of the prompt."""
    scaling = (("factor", 4.0), ("original_max_position_embeddings", 30.0))
    config = replace(TINY, context_length=1024, rope=RopeConfig(kind="dynamic", scaling=scaling))
    return Decoder(config, random_tensors(config), torch.float64, torch.device("cpu"))


TARGETS: dict[str, Callable[[], Decoder]] = {
    "keys and values": lambda: toy_target(context_length=2048),
    "a window": windowed,
    "recurrent states": tiny_hybrid,
    "mamba": tiny_mamba,
    "latent attention": lambda: decoder("deepseek v3"),
}


def eagle(target: Decoder) -> Eagle:
    config = eagle_config(version=3)
    return Eagle(config, eagle_tensors(config), target)


DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "eagle-3": eagle,
    "model": lambda target: DraftModel(toy_target(seed=9, context_length=2048), 37),
    "block": lambda target: Block(TINY_BLOCK, block_tensors(), target),
    "stack": lambda target: DrafterStack([NGram(), eagle(target)]),
    "shared tokens": lambda target: SharedTokenDrafter(
        VocabMap(toy_model(context_length=1024), toy_foreigner(seed=9, context_length=1024))
    ),
}


def started(
    folder: Path,
    target: Decoder | None = None,
    drafter: Drafter | None = None,
    memory: int = PLENTY,
    disk: int = PLENTY,
    chunk_invariant: bool = True,
) -> CachedEngine:
    """Return a new engine with a folder, as after a start."""
    target = target or toy_target(context_length=2048)
    engine = CachedEngine(target, drafter, DraftBudget.chain(3), PrefixCache(0))
    keyed = {"the drafter": (drafter_key(drafter, target), drafter)} if drafter else {}
    store = PrefixStore(folder, disk, target_key(target), engine.cache, keyed)
    engine.prefixes = PrefixCache(memory, chunk_invariant, store)
    return engine


def store_of(engine: CachedEngine) -> PrefixStore:
    assert engine.prefixes is not None
    assert engine.prefixes.disk is not None
    return engine.prefixes.disk


def replied(engine: CachedEngine, prompt: Sequence[int] = PROMPT) -> list[int]:
    return run(engine.target, prompt, SAMPLING, engine=engine)[0]


def written(folder: Path, prompt: Sequence[int] = PROMPT) -> Path:
    """Write a reply's text to the folder, and return its file."""
    before = {*folder.glob("*.prefix")} if folder.exists() else set()
    engine = started(folder)
    replied(engine, prompt)
    engine.save_prefixes(60)
    (file,) = {*folder.glob("*.prefix")} - before
    return file


def settled(store: PrefixStore) -> None:
    """Wait at most a minute until everything is written."""
    until = time.monotonic() + 60
    while store.waiting and time.monotonic() < until:
        time.sleep(0.001)
    assert not store.waiting


@some("kind", [*TARGETS], fast=["keys and values", "a window", "recurrent states", "latent attention"])
def test_a_restart_finds_the_prefix_and_continues_with_the_same_text(kind: str, tmp_path: Path) -> None:
    make = TARGETS[kind]
    first = started(tmp_path, make())
    text = [*PROMPT, *replied(first)]
    first.save_prefixes(60)
    again = started(tmp_path, make())
    more = [*text, 3, 1, 4]
    reply, _, stats = run(again.target, more, SAMPLING, engine=again)
    assert again.cached[0] >= len(text) - 2
    assert stats.from_disk == stats.cached == again.cached[0]
    assert again.prefixes is not None
    assert again.prefixes.hits == again.cached[0]
    assert PrefixCache(0, True, store_of(again)).estimate_hit(more) == again.cached[0]
    assert reply == run(make(), more, SAMPLING)[0]


@some("name", [*DRAFTERS], fast=["eagle-3", "model", "stack"])
def test_a_restart_finds_the_states_of_drafters(name: str, tmp_path: Path) -> None:
    make, prompt = DRAFTERS[name], PROMPT[:150]
    target = toy_target(context_length=2048) if name != "shared tokens" else toy_model(context_length=1024).target
    assert isinstance(target, Decoder)
    first = started(tmp_path, target, make(target))
    text = [*prompt, *replied(first, prompt), 5, 6, 7]
    first.save_prefixes(60)
    expected = replied(first, text)
    again = started(tmp_path, target, make(target))
    assert replied(again, text) == expected == run(target, text, SAMPLING)[0]
    assert again.cached == first.cached[1:]
    assert again.drafter is not None
    (stored,) = store_of(again).texts
    assert [*stored.drafters] == ["the drafter"]


def test_another_drafter_does_not_use_the_states_but_the_target_does(tmp_path: Path) -> None:
    target = toy_target(context_length=2048)
    first = started(tmp_path, target, eagle(target))
    replied(first)
    first.save_prefixes(60)
    config = eagle_config(version=3)
    other = Eagle(config, eagle_tensors(config, seed=7), target)
    again = started(tmp_path, target, other)
    assert replied(again, [*PROMPT, 1]) == run(target, [*PROMPT, 1], SAMPLING)[0]
    assert again.cached == [0], "it needs its own states"
    plain = started(tmp_path, target)
    replied(plain, [*PROMPT, 1])
    assert plain.cached == [len(PROMPT) - 1]


def test_keys_of_another_prompt_length_stay_unused_after_a_restart(tmp_path: Path) -> None:
    first = started(tmp_path, turned())
    replied(first, PROMPT[:40])
    first.save_prefixes(60)
    again = started(tmp_path, turned())
    for length, cached in ((45, 0), (40, 38)):
        assert replied(again, PROMPT[:length]) == run(turned(), PROMPT[:length], SAMPLING)[0]
        assert again.cached[-1] == cached


def test_a_text_is_not_rewritten_for_a_drafter_that_was_loaded_later(tmp_path: Path) -> None:
    """`--learn` loads drafters while the server runs, and earlier files have no states of these drafters."""
    target = toy_target(context_length=2048)
    cache = PrefixCache(PLENTY, True, store_of(started(tmp_path, target)))
    engine = CachedEngine(target, eagle(target), DraftBudget.chain(3), cache)
    replied(engine)
    engine.save_prefixes(60)
    assert engine.kept_tokens() > len(PROMPT)
    assert engine.write_prefixes() == []


def test_only_whole_chunks_are_used_if_passes_change_bits(tmp_path: Path) -> None:
    prompt = [i % 29 for i in range(2 * PREFILL_ROWS + 40)]
    first = started(tmp_path, chunk_invariant=False)
    replied(first, prompt)
    first.save_prefixes(60)
    again = started(tmp_path, chunk_invariant=False)
    replied(again, prompt)
    assert again.cached == [2 * PREFILL_ROWS]


def test_a_text_that_leaves_memory_is_found_on_disk(tmp_path: Path) -> None:
    engine = started(tmp_path / "other")
    replied(engine)
    assert engine.prefixes is not None
    engine = started(tmp_path, memory=3 * engine.prefixes.nbytes // 2)
    first, second = PROMPT, [*PROMPT[::-1]]
    for prompt in (first, second):
        replied(engine, prompt)
        settled(store_of(engine))
    assert engine.prefixes is not None
    assert len(engine.prefixes) == 1
    assert replied(engine, [*first, 5]) == plain_text(engine.target, [*first, 5], SAMPLING)
    assert engine.cached[-1] >= len(first) - 1


def test_a_long_prompt_is_written_before_its_reply_ends(tmp_path: Path) -> None:
    engine = started(tmp_path)
    long = [i * i % 31 for i in range(1200)]
    replied(engine, long)
    settled(store_of(engine))
    assert len([*tmp_path.glob("*.prefix")]) == 1
    replied(engine, [*long, 1, 2, 3])
    settled(store_of(engine))
    assert len([*tmp_path.glob("*.prefix")]) == 1, "a few more tokens do not make it worth writing again"
    again = started(tmp_path)
    replied(again, [*long, 5])
    assert again.cached == [1199]


def test_a_longer_text_replaces_its_beginning(tmp_path: Path) -> None:
    engine = started(tmp_path)
    text = [*PROMPT, *replied(engine)]
    engine.save_prefixes(60)
    (short,) = tmp_path.iterdir()
    replied(engine, [*text, *PROMPT])
    engine.save_prefixes(60)
    (longer,) = tmp_path.iterdir()
    assert longer != short
    engine.save_prefixes(60)
    assert [*tmp_path.iterdir()] == [longer], "nothing is new"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Return the name and the content of a file."""
    file = written(tmp_path_factory.mktemp("prefixes"))
    return file.name, file.read_bytes()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "paceline.prefixes")
    return lambda: [record.getMessage() for record in caplog.records]


def spoiled(content: bytes) -> Iterator[bytes]:
    """Yield versions of a file that are truncated or have a flipped bit, at offsets spread over the file."""
    header = 32 + sum(prefix_file._FIXED_HEADER.unpack(content[:32])[3:])
    offsets = {*range(0, 33, 3), *range(40, header, 397), *range(8192, len(content), len(content) // 40)}
    for offset in sorted(offsets):
        yield content[:offset]
        if not header <= offset < 8192:
            flipped = bytearray(content)
            flipped[offset] ^= 1 << offset % 8
            yield bytes(flipped)


def test_damaged_files_are_never_believed(
    sample: tuple[str, bytes], tmp_path: Path, logged: Callable[[], list[str]]
) -> None:
    """A file that is truncated or changed anywhere causes one line in the log, and the text as without a cache."""
    name, content = sample
    path, target = tmp_path / name, toy_target(context_length=2048)
    store = started(tmp_path, target)
    believed = 0
    for bad in spoiled(content):
        path.write_bytes(bad)
        path.chmod(0o600)
        before = len(logged())
        again = PrefixStore(tmp_path, PLENTY, target_key(target), store.cache, {})
        for text in again.texts:
            if (read := again.read(text)) is not None:
                believed += 1
                assert path.read_bytes() != bad or read is None
        assert len(logged()) == before + 1
        assert not again.texts
    assert believed == 0
    path.write_bytes(content)
    (text,) = PrefixStore(tmp_path, PLENTY, target_key(target), store.cache, {}).texts
    assert text.tokens[: len(PROMPT)].tolist() == PROMPT


def test_the_reply_goes_on_without_a_damaged_file(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    file = written(tmp_path)
    engine = started(tmp_path)
    content = bytearray(file.read_bytes())
    content[-5] ^= 16
    file.write_bytes(content)
    prompt = [*PROMPT, 7]
    assert replied(engine, prompt) == plain_text(engine.target, prompt, SAMPLING)
    assert engine.cached == [0]
    assert len(logged()) == 1
    assert not file.exists()


def test_the_reply_goes_on_if_a_device_has_no_memory_for_a_prefix(
    tmp_path: Path, logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    file, plain = written(tmp_path), run(toy_target(context_length=2048), PROMPT, SAMPLING)[0]
    monkeypatch.setattr(prefix_file, "_tensor", fail)
    engine = started(tmp_path)
    assert replied(engine) == plain
    assert engine.cached == [0]
    assert file.exists()
    assert len(logged()) == 1


def test_foreign_files_and_links_are_not_touched(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    folder, secret = tmp_path / "prefixes", tmp_path / "elsewhere"
    file = written(folder)
    secret.write_bytes(file.read_bytes())
    key = file.name[:32]
    (folder / "notes.txt").write_text("mine")
    (folder / f"{key}-{'a' * 32}.prefix").write_text("another program's file, longer than a header")
    (folder / f"{key}-{'b' * 32}.prefix").symlink_to(secret)
    os.mkfifo(folder / f"{key}-{'c' * 32}.prefix")
    (folder / f"{key}-{'d' * 32}.prefix").mkdir()
    before = sorted(folder.iterdir())
    engine = started(folder)
    assert len(store_of(engine).texts) == 1
    assert sorted(folder.iterdir()) == before
    assert len(logged()) == 4


def test_swapped_files_are_told_apart_by_their_content(tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path, PROMPT[::-1])
    engine = started(tmp_path)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    for prompt in ([*PROMPT, 1], [*PROMPT[::-1], 1]):
        assert replied(engine, prompt) == plain_text(engine.target, prompt, SAMPLING)
    again = started(tmp_path)
    for prompt in ([*PROMPT, 1], [*PROMPT[::-1], 1]):
        assert replied(again, prompt) == plain_text(again.target, prompt, SAMPLING)
    assert again.cached == [len(PROMPT) - 1] * 2


def test_another_model_of_the_same_shape_uses_none_of_them(tmp_path: Path) -> None:
    file = written(tmp_path)
    other = toy_target(seed=1, context_length=2048)
    engine = started(tmp_path, other)
    assert not store_of(engine).texts
    assert file.name[:32] != target_key(other)[:32]
    renamed = file.rename(tmp_path / (target_key(other)[:32] + file.name[32:]))
    engine = started(tmp_path, other)
    assert not store_of(engine).texts, "its name claims another model"
    assert renamed.exists()
    assert replied(engine, [*PROMPT, 1]) == run(other, [*PROMPT, 1], SAMPLING)[0]


def test_a_key_covers_weights_dtypes_rotary_options_and_cache() -> None:
    def made(**changes: object) -> Decoder:
        config = replace(TINY, **changes)  # type: ignore[arg-type]
        return Decoder(config, random_tensors(TINY), torch.float64, torch.device("cpu"))

    tensors = random_tensors(TINY)
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    tensors[name].view(-1)[5] *= 1.001
    targets = [
        made(),
        Decoder(TINY, tensors, torch.float64, torch.device("cpu")),
        Decoder(TINY, random_tensors(TINY), torch.float32, torch.device("cpu")),
        made(rope=replace(TINY.rope, theta=20000.0)),
        made(context_length=128),
        windowed(),
        *(
            Decoder(TINY, random_tensors(TINY), torch.float64, torch.device("cpu"), kv_dtype=x)
            for x in (torch.int8, torch.float32)
        ),
    ]
    keys = [target_key(target) for target in targets]
    assert len({*keys}) == len(keys)
    assert keys[0] == target_key(made())
    run(targets[0], PROMPT[:50], SAMPLING)
    assert keys[0] == target_key(targets[0]), "passes do not change it"


def test_adapters_are_kept_apart(tmp_path: Path) -> None:
    prefixes, again = (PrefixCache(PLENTY, True, PrefixStore(tmp_path, PLENTY, "a" * 64, None, {})) for _ in range(2))
    for adapter in (0, 1):
        prefixes.store(PROMPT, 300, Saved(299, (torch.full((4,), adapter),)), adapter=adapter)
    prefixes.flush(60)
    for adapter in (0, 1):
        hit = again.find([*PROMPT, 1], adapter=adapter)
        assert hit is not None
        assert hit.target.tensors[0].tolist() == [adapter] * 4
    assert again.find([*PROMPT, 1], adapter=2) is None


def test_the_folder_keeps_its_limit_and_drops_what_was_used_least_recently(tmp_path: Path) -> None:
    size = written(tmp_path / "one").stat().st_size
    folder = tmp_path / "few"
    engine = started(folder, memory=PLENTY, disk=3 * size + size // 2)
    prompts = [[first, *PROMPT[1:]] for first in range(4)]
    for prompt in prompts[:3]:
        replied(engine, prompt)
        engine.save_prefixes(60)
    again = started(folder, disk=3 * size + size // 2)
    replied(again, [*prompts[0], 5])
    replied(engine, prompts[3])
    engine.save_prefixes(60)
    assert store_of(again).nbytes <= 3 * size + size // 2
    last = started(folder)
    assert last.prefixes is not None
    assert [bool(last.prefixes.find([*prompt, 5])) for prompt in prompts] == [True, False, True, True]


def test_a_text_larger_than_the_limit_removes_nothing(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    size = written(tmp_path).stat().st_size
    engine = started(tmp_path, disk=2 * size)
    replied(engine, [i % 31 for i in range(1000)])
    engine.save_prefixes(60)
    assert len([*tmp_path.iterdir()]) == 1
    assert len(logged()) == 1


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        file = written(tmp_path / "a" / "prefixes")
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidOption, match="other users"):
        started(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match="cannot be used"):
        started(tmp_path / "file")


@pytest.mark.parametrize("call", ["open", "write", "replace", "utime", "scandir", "unlink"])
def test_errors_of_the_disk_cost_no_reply(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    engine = started(tmp_path)

    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr("paceline.engine.prefix_store.write", fails)
    else:
        monkeypatch.setattr(f"os.{call}", fails)
    for prompt in (PROMPT, PROMPT[::-1]):
        assert replied(engine, prompt) == plain_text(engine.target, prompt, SAMPLING)
        engine.save_prefixes(60)
    monkeypatch.undo()
    assert len(logged()) == (call != "unlink")
    assert not [*tmp_path.glob("*.tmp")]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, other = started(tmp_path), started(tmp_path)
    replied(one)
    one.save_prefixes(60)
    replied(other, [*PROMPT, 1, *range(30)])
    assert other.cached == [len(PROMPT) - 1], "a file that appeared since it started"
    for file in tmp_path.iterdir():
        file.unlink()
    replied(started(tmp_path), [*PROMPT, 2])
    third = started(tmp_path)
    replied(third, [*PROMPT, 3])
    assert third.cached == [0]
    one.save_prefixes(60)
    other.save_prefixes(60)
    assert len([*tmp_path.glob("*.prefix")]) == 2


def test_a_file_that_vanishes_costs_no_reply(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    file = written(tmp_path)
    engine = started(tmp_path)
    seen = store_of(engine)
    seen._seen = tmp_path.stat().st_mtime_ns
    file.unlink()
    seen._seen = tmp_path.stat().st_mtime_ns
    replied(engine, [*PROMPT, 1])
    assert engine.cached == [0]
    assert not logged()


def test_unfinished_files_of_dead_processes_are_removed(sample: tuple[str, bytes], tmp_path: Path) -> None:
    name, content = sample
    stale, fresh = (tmp_path / f"{name.removesuffix('.prefix')}.{pid}-7.tmp" for pid in (1, 2))
    for path in (stale, fresh):
        path.write_bytes(content[: len(content) // 2])
    os.utime(stale, (time.time() - 3600,) * 2)
    engine = started(tmp_path)
    assert not store_of(engine).texts
    replied(engine)
    engine.save_prefixes(60)
    assert not stale.exists()
    assert fresh.exists()


def test_time_that_runs_out_leaves_no_half_of_a_file(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    engine = started(tmp_path)
    replied(engine)
    engine.save_prefixes(-1)
    assert not [*tmp_path.iterdir()]
    assert len(logged()) == 1


def test_time_that_runs_out_removes_no_older_text(tmp_path: Path) -> None:
    file = written(tmp_path)
    engine = started(tmp_path, disk=file.stat().st_size * 3 // 2)
    replied(engine, [30, *PROMPT])
    engine.save_prefixes(-1)
    assert [*tmp_path.iterdir()] == [file]


def test_files_with_future_dates_are_evicted(tmp_path: Path) -> None:
    """Their modification times are in the future, because the clock was wrong when they were written."""
    file = written(tmp_path)
    os.utime(file, (time.time() + 86400,) * 2)
    engine = started(tmp_path, disk=file.stat().st_size * 3 // 2)
    replied(engine, [30, *PROMPT])
    engine.save_prefixes(60)
    assert len([*tmp_path.iterdir()]) == 1
    assert not file.exists()


def test_texts_that_wait_hold_a_quarter_of_the_memory_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixStore, "_write_all", lambda self: None)  # a disk that never gets on
    engine = started(tmp_path, memory=8_000)
    assert engine.prefixes is not None
    for first in range(20):
        size = 500 if first < 10 else 5_000  # more than the whole memory, with its tokens
        engine.prefixes.store([first, *range(499)], 500, Saved(499, (torch.zeros(size, dtype=torch.uint8),)))
        waiting = [text for text in store_of(engine).waiting if text not in engine.prefixes._entries]
        assert sum(text.nbytes for text in waiting) <= max(8_000 // 4, 4_000 + size)
    engine.prefixes.clear()
    assert not store_of(engine).waiting


class _Unknown(Saved):
    """A cache state that Paceline does not know."""


def test_a_state_without_a_form_is_not_written(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    engine = started(tmp_path)
    assert engine.prefixes is not None
    for first in range(3):
        engine.prefixes.store([first, *PROMPT], 301, _Unknown(300, (torch.zeros(4),)))
    engine.save_prefixes(60)
    assert not [*tmp_path.iterdir()]
    assert len(logged()) == 1


def test_a_text_larger_than_memory_goes_to_disk(tmp_path: Path) -> None:
    engine = started(tmp_path, memory=1000)
    replied(engine)
    settled(store_of(engine))
    assert engine.prefixes is not None
    assert not len(engine.prefixes)
    replied(engine, [*PROMPT, 1])
    assert engine.cached == [0, len(PROMPT) - 1]


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_native_kernels_continue_from_disk_bit_by_bit(tmp_path: Path) -> None:
    """Check this with the engine's own checks, and with the logits of the first round."""
    states = []
    for folder, prompts in ((tmp_path, [PROMPT[:200]]), (tmp_path, [PROMPT]), (None, [PROMPT])):
        engine = Engine(native(BASE))
        engine.remember(PLENTY, folder, PLENTY)
        for prompt in prompts:
            request = begun(engine, prompt, Sampling())
            states.append((request.stats.from_disk, engine.cache.save(request.slot).tensors))
            engine.finish(request)
        engine.save_prefixes(60)
    assert [from_disk for from_disk, _ in states] == [0, 199, 0]
    assert all(map(torch.equal, states[1][1], states[2][1]))


KILLED = """
import sys, torch
from pathlib import Path
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.prefix_store import PrefixStore
from paceline.protocols import Saved
store = PrefixStore(Path(sys.argv[1]), 1 << 30, "a" * 64, None, {})
print("ready", flush=True)
for first in range(10_000):
    prefixes = PrefixCache(1 << 30, True, store)
    prefixes.store([first, *range(99)], 100, Saved(99, (torch.full((8 << 20,), first % 100, dtype=torch.uint8),)))
    prefixes.flush(60)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_only_whole_texts(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    found = 0
    for delay in (0.05, 0.3):
        with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.kill()
        store = PrefixStore(tmp_path, PLENTY, "a" * 64, None, {})
        for text in store.texts:
            read = store.read(text)
            assert read is not None
            assert (read.target.tensors[0] == int(read.tokens[0]) % 100).all()
            found += 1
    assert found
    assert not logged()
