from pathlib import Path

import pytest
import torch

from paceline.train.states import SHARD, DocumentBatch, States
from paceline.types import Forward, Rows, Want
from paceline.verify.tree import pack_prefix
from tests.train.toys import TAPS, TARGET, documents, selection


def all_of(states: States) -> list[torch.Tensor]:
    return [s.states["final"] for i in range(states.shards) for s in states.shard(i)]


def test_states_are_those_of_the_document_fed_alone() -> None:
    made = documents(9)
    studied = States(TARGET, selection(made), TAPS).shard(0)
    for document, one in zip(made, studied, strict=True):
        cache = TARGET.new_cache()
        rows = pack_prefix([*document.prompt, *document.answer], cache.acquire(), 0, TARGET.device)
        alone = TARGET.forward(rows, cache, Want("none", taps=(*TAPS, "final"))).taps
        for tap in (*TAPS, "final"):
            torch.testing.assert_close(one.states[tap], alone[tap][0, : len(document)])
        assert one.tokens.tolist() == [*document.prompt, *document.answer]
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
    first = all_of(States(TARGET, selection(documents(70)), TAPS, tmp_path, 10**9))
    again = States(TARGET, selection(documents(70)), TAPS, tmp_path, 10**9)
    monkeypatch.setattr(again, "_compute", None)
    assert all(torch.equal(a, b) for a, b in zip(first, all_of(again), strict=True))


def test_a_torn_file_is_computed_again(tmp_path: Path) -> None:
    first = all_of(States(TARGET, selection(documents(5)), TAPS, tmp_path, 10**9))
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    again = all_of(States(TARGET, selection(documents(5)), TAPS, tmp_path, 10**9))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_more_is_kept_than_allowed(tmp_path: Path) -> None:
    all_of(States(TARGET, selection(documents(3 * SHARD)), TAPS, tmp_path, 10**9))
    whole = [f.stat().st_size for f in tmp_path.iterdir()]
    bounded = tmp_path / "bounded"
    all_of(States(TARGET, selection(documents(3 * SHARD)), TAPS, bounded, sum(whole) - 1))
    assert 0 < sum(f.stat().st_size for f in bounded.iterdir()) < sum(whole)
    assert len(list(bounded.iterdir())) == 2


def test_what_was_kept_before_counts(tmp_path: Path) -> None:
    all_of(States(TARGET, selection(documents(SHARD)), TAPS, tmp_path, 10**9))
    (kept,) = tmp_path.iterdir()
    kept.rename(tmp_path / "000007.safetensors")
    all_of(
        States(TARGET, selection(documents(SHARD)), TAPS, tmp_path, (tmp_path / "000007.safetensors").stat().st_size)
    )
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_keeps_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.train.states.save_file", full)
    assert len(all_of(States(TARGET, selection(documents(5)), TAPS, tmp_path, 10**9))) == 5
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
