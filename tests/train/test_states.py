from pathlib import Path

import pytest
import torch

from paceline.engine.engine import Engine
from paceline.recording.states import StateFiles, StateKeeper
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.train.documents import Document
from paceline.train.states import SHARD, DocumentBatch, States
from paceline.types import DraftBudget, Forward, Rows, Want
from paceline.verify.tree import pack_prefix
from tests.support.train_toys import TAPS, TARGET, documents, selection


def stored(folder: Path, limit: int = 10**9) -> StateFiles:
    return StateFiles(folder, TAPS, limit)


def all_of(states: States) -> list[torch.Tensor]:
    return [s.states["final"] for i in range(states.shards) for s in states.shard(i)]


def test_states_equal_the_states_of_a_single_document() -> None:
    made = documents(9)
    studied = States(TARGET, selection(made), TAPS).shard(0)
    for document, one in zip(made, studied, strict=True):
        cache = TARGET.new_cache()
        text = [*document.prompt, *document.answer][:-1]
        rows = pack_prefix(text, cache.acquire(), 0, TARGET.device)
        alone = TARGET.forward(rows, cache, Want("none", taps=(*TAPS, "final"))).taps
        for tap in (*TAPS, "final"):
            torch.testing.assert_close(one.states[tap][:-1], alone[tap][0, : len(text) - 1])
        assert one.tokens.tolist() == text
        assert one.prompt == len(document.prompt)


def test_shards_hold_every_document_once_and_batches_are_shuffled_by_the_seed() -> None:
    states = States(TARGET, selection(documents(SHARD + 7)), TAPS)
    assert states.shards == 2
    assert [states.size(0), states.size(1)] == [SHARD, 7]

    def lengths(seed: str) -> list[list[int]]:
        return [batch.lengths.tolist() for batch in states.batches(0, 4, seed)]

    assert lengths("a") == lengths("a") != lengths("b")
    assert sorted(map(tuple, lengths("a"))) == sorted(map(tuple, lengths("b")))
    assert sum(map(len, lengths("a"))) == SHARD


def test_kept_states_are_read_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = all_of(States(TARGET, selection(documents(70)), TAPS, stored(tmp_path)))
    again = States(TARGET, selection(documents(70)), TAPS, stored(tmp_path))
    monkeypatch.setattr(again, "_pass", None)
    assert all(torch.equal(a, b) for a, b in zip(first, all_of(again), strict=True))


def test_states_are_kept_while_texts_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = StateKeeper(stored(tmp_path))
    made = []
    for prompt in ([1, 2, 3, 4], [5, 6], [7]):
        engine = Engine(TARGET, keeper, DraftBudget.chain(0))
        reply, _, _ = run(TARGET, prompt, Sampling(max_new_tokens=12, temperature=0.8, seed=1), engine=engine)
        made.append(Document(tuple(prompt), tuple(reply)))
    kept = States(TARGET, selection(made), TAPS, stored(tmp_path))
    computed = States(TARGET, selection(made), TAPS).shard(0)
    monkeypatch.setattr(kept, "_pass", None)
    for one, other in zip(kept.shard(0), computed, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        for tap in (*TAPS, "final"):
            torch.testing.assert_close(one.states[tap], other.states[tap])


def test_all_that_is_missing_is_computed_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of(States(TARGET, selection(documents(5)), TAPS, stored(tmp_path)))
    states = States(TARGET, selection(documents(19)), TAPS, stored(tmp_path))
    seen: list[tuple[int, int]] = []
    states.prepare(lambda done, total: seen.append((done, total)))
    assert seen == [(8, 19), (16, 19), (19, 19)]
    assert len(list(tmp_path.iterdir())) == 19
    monkeypatch.setattr(states, "_pass", None)
    states.prepare()
    assert len(all_of(states)) == 19
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    States(TARGET, selection(documents(19)), TAPS, stored(tmp_path / "small", size // 2)).prepare(
        lambda done, total: seen.append((done, total))
    )
    assert seen[3:] == [(8, 19)]


def test_states_of_other_taps_are_computed_again(tmp_path: Path) -> None:
    StateFiles(tmp_path, (1,), 10**9).write([1, 2], {1: torch.zeros(2, 4), "final": torch.zeros(2, 4)})
    assert stored(tmp_path).read([1, 2]) is None
    stored(tmp_path).write([1, 2], {tap: torch.ones(2, 4) for tap in (*TAPS, "final")})
    read = stored(tmp_path).read([1, 2])
    assert read is not None
    assert read["final"].tolist() == [[1] * 4] * 2


def test_a_torn_file_is_computed_again(tmp_path: Path) -> None:
    first = all_of(States(TARGET, selection(documents(5)), TAPS, stored(tmp_path)))
    for kept in tmp_path.iterdir():
        kept.write_bytes(kept.read_bytes()[:-100])
    again = all_of(States(TARGET, selection(documents(5)), TAPS, stored(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_more_is_kept_than_allowed_and_what_was_kept_before_counts(tmp_path: Path) -> None:
    all_of(States(TARGET, selection(documents(9)), TAPS, stored(tmp_path / "all")))
    size = sum(f.stat().st_size for f in (tmp_path / "all").iterdir())
    for count in (5, 9):
        all_of(States(TARGET, selection(documents(count)), TAPS, stored(tmp_path / "some", size - 1)))
        assert len(list((tmp_path / "some").iterdir())) == min(count, 8)


def test_a_full_disk_keeps_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.recording.states.save_file", full)
    assert len(all_of(States(TARGET, selection(documents(5)), TAPS, stored(tmp_path)))) == 5
    assert not list(tmp_path.iterdir())


def test_a_batch_splits_into_parts_that_are_its_documents() -> None:
    (batch,) = States(TARGET, selection(documents(5)), TAPS).batches(0, 5, "")
    parts = batch.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert isinstance(parts[0], DocumentBatch)
    assert torch.equal(torch.cat([part.states[2] for part in parts]), batch.states[2])


def test_a_pass_that_finds_no_memory_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = documents(9)
    whole = States(TARGET, selection(made), TAPS).shard(0)
    forward, passes = TARGET.forward, []

    def cramped(rows: Rows, cache: object, want: Want) -> Forward:
        passes.append(len(rows.slots))
        if len(rows.slots) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 3 GiB")
        return forward(rows, cache, want)

    monkeypatch.setattr(TARGET, "forward", cramped)
    monkeypatch.setattr("paceline.train.states._PASS", 256)
    parts = States(TARGET, selection(made), TAPS).shard(0)
    assert max(passes) > 2, "memory never ended"
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.states["final"], other.states["final"])

    def none(*_: object) -> Forward:
        raise MemoryError

    monkeypatch.setattr(TARGET, "forward", none)
    with pytest.raises(MemoryError):
        States(TARGET, selection(made), TAPS).shard(0)
