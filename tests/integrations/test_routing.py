"""Requests with the same prefix have one owner, few change owner with the replicas, and none waits for a busy owner."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from paceline.integrations.routing import Route, rank_replicas, route_of

NAMES = [f"replica-{i}" for i in range(10)]


def route(headers: dict[str, str] | None = None, **body: Any) -> Route:
    return route_of(headers or {}, json.dumps(body).encode())


def chat(*texts: str, system: str = "Be brief.") -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *said]


def owner(route: Route, names: list[str] = NAMES) -> str:
    return names[rank_replicas(route, names, lambda _: 0)[0][0]]


def test_every_turn_of_a_conversation_has_the_route_of_the_first() -> None:
    first = route(messages=chat("hello"))
    assert route(messages=chat("hello", "hi", "how are you?"), temperature=1) == first
    assert route(messages=chat("good morning")) != first
    assert route(messages=chat("hello"), model="other") != first
    assert route(messages=chat("hello"), tools=[{"type": "function"}]) != first


@pytest.mark.parametrize("field", ["prompt", "input", "system", "instructions"])
def test_prompts_that_begin_alike_share_their_keys(field: str) -> None:
    short, long = (
        route(**{field: text}) for text in ("a" * 500 + "b" * 4000 + "question", "a" * 500 + "b" * 4000 + "another")
    )
    assert short == long
    one, two = (route(**{field: "a" * 1000 + end}) for end in ("question", "another"))
    assert one.keys[0] == two.keys[0]
    assert one.keys[1] != two.keys[1]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**5, b'{"a":NaN}'])
def test_an_invalid_body_may_go_to_any_replica(body: bytes) -> None:
    assert route_of({}, body) == Route()
    assert len(rank_replicas(Route(), NAMES, lambda _: 0)[0]) == 2


@pytest.mark.parametrize("messages", [[], "text", {"role": "user"}, [1, None], [{"role": {}}], [[{"role": "user"}]]])
def test_messages_of_any_kind_have_a_route(messages: Any) -> None:
    assert route(messages=messages) == route(messages=messages)


def test_a_session_stays_whatever_it_says_and_however_busy_its_replica_is() -> None:
    one, two = (route({"x-session-id": "s"}, messages=chat(text)) for text in ("hello", "bye"))
    assert one == two
    (groups,) = {str(rank_replicas(one, NAMES, lambda i, n=n: n * i)) for n in (0, 100)}
    assert groups.count("[") == 2, "one group, of one replica"


def test_keys_are_shared_out_evenly() -> None:
    counts = Counter(owner(route(prompt=str(i))) for i in range(5000))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 600  # of 500: five standard deviations


def test_a_replica_that_comes_or_goes_moves_only_its_own_keys() -> None:
    routes = [route(prompt=str(i)) for i in range(200)]
    for gone in NAMES:
        left = [name for name in NAMES if name != gone]
        moved = [r for r in routes if owner(r, left) != owner(r)]
        assert moved == [r for r in routes if owner(r) == gone]


def test_order_and_process_do_not_matter() -> None:
    shuffled = random.Random(1).sample(NAMES, len(NAMES))
    for i in range(50):
        assert owner(route(prompt=str(i)), shuffled) == owner(route(prompt=str(i)))
    assert owner(route(prompt="the same in every process")) == "replica-6"


def test_a_busy_owner_is_relieved_by_two_that_its_conversation_keeps() -> None:
    system = "a" * 600
    first, second = (route(messages=chat(text, system=system)) for text in ("hello", "bye"))
    assert first.keys[0] == second.keys[0]
    busy = NAMES.index(owner(first))

    def load(i: int) -> int:
        return 5 if i == busy else 1

    pair = rank_replicas(first, NAMES, load)[0]
    assert len(pair) == 2
    assert pair == rank_replicas(first, NAMES, load)[0]
    assert pair != rank_replicas(second, NAMES, load)[0]
    assert rank_replicas(first, NAMES, lambda i: 2 if i == busy else 1)[0] == [busy], "not much more than the mean"
    assert rank_replicas(first, NAMES, lambda _: 5)[0] == [busy], "all are as busy"


def test_one_replica_and_none_will_do() -> None:
    for asked in (route(prompt="a"), Route()):
        assert rank_replicas(asked, ["one"], lambda _: 100)[0] == [0]
        assert not any(rank_replicas(asked, [], lambda _: 0))
