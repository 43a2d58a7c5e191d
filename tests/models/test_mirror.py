"""Calls that all ranks repeat, with a group of one that records its messages."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from paceline.errors import InvalidOption, RankLost
from paceline.models.mirror import Mirror, Mirrored, collective, repeated


class Alone:
    """`Ranks` without other ranks. `left` counts the ends of the group."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.left, self.sent = rank, 0, list[bytes]()

    def leave(self) -> None:
        self.left += 1

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> bytes:
        return pickle.dumps([])


class Counter(Mirrored):
    def __init__(self, ranks: Any) -> None:
        self.mirror, self.count = Mirror(ranks), 0
        self.mirror.hold(self)

    @repeated
    def add(self, error: BaseException | None = None) -> None:
        self.count += 1
        if error:
            raise error

    @repeated
    def itself(self) -> Counter:
        return self

    @collective
    def total(self) -> int:
        return self.count


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_an_aborted_call_ends_the_group(error: BaseException) -> None:
    """Otherwise, the other ranks would be one call behind."""
    ranks = Alone()
    counter = Counter(ranks)
    with pytest.raises(type(error)):
        counter.add(error)
    assert ranks.left
    with pytest.raises(RankLost, match="have ended"):
        counter.total()


def test_a_refused_call_is_not_repeated() -> None:
    ranks = Alone()
    counter = Counter(ranks)
    with pytest.raises(InvalidOption):
        counter.add(InvalidOption("x", "y"))
    assert not ranks.left
    counter.add()
    assert counter.total() == 2
    assert len(pickle.loads(ranks.sent[-1])) == 2  # add and total


def test_an_object_that_returns_itself_keeps_its_number() -> None:
    ranks = Alone()
    counter = Counter(ranks)
    group = counter.mirror
    assert counter.itself() is counter
    number, dropped = group.hold(counter), len(group._waiting)
    assert number == 0
    del counter
    gc.collect()
    assert len(group._waiting) == dropped + 1


def test_the_other_ranks_collect_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks follow from inside `load`, which pauses the garbage collector."""
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    gc.disable()
    try:
        with pytest.raises(SystemExit):
            Mirror(Alone(1)).follow()  # type: ignore[arg-type]
        assert gc.isenabled()
    finally:
        gc.enable()
