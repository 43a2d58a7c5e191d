"""The engine's thread: concurrent replies without effects on each other, and the ends of replies."""

from __future__ import annotations

import asyncio
import ctypes
import math
import platform
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil
import pytest

from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.cache.state import max_states
from paceline.drafters.base import Ask
from paceline.drafters.model import DraftModel
from paceline.drafters.stack import DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_policy import SPECULATION_OFF, Speculation
from paceline.engine.engine import Engine
from paceline.engine.reading_pace import ReadingPace
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.llm import LLM, load
from paceline.sampling.parameters import Sampling
from paceline.server import worker as workers
from paceline.server.answers import RunningRequest
from paceline.server.limits import RequestLimit
from paceline.server.metrics import Metrics
from paceline.server.models import LoadedModel
from paceline.server.tracing import Tracer
from paceline.server.worker import (
    Busy,
    ReplyJob,
    ReplyRound,
    ServerStopping,
    Worker,
    WorkerLimits,
    _fits,
    _positions,
    trim_memory,
)
from paceline.testing import tiny_target
from paceline.types import Draft, DraftBudget
from tests.conftest import packaged_model
from tests.support.toys import toy_llm, toy_model

T = TypeVar("T")
SUFFIX = Speculation("suffix")


def toy(**changes: int) -> LLM:
    return LLM(toy_model(**changes), {"suffix": Suffix()})


def job(llm: LLM, prompt: str, how: Sampling, speculation: Speculation | None = None, **more: Any) -> ReplyJob:
    return ReplyJob(llm.prompt_ids(prompt), how.seeded(), speculation=speculation, **more)


@dataclass
class Reading:
    """A submitted job and its outputs."""

    worker: Worker
    job: ReplyJob

    def __post_init__(self) -> None:
        self.outputs: asyncio.Queue[ReplyRound] = asyncio.Queue()
        self.handle = self.worker.submit(self.job, self.outputs)

    async def tokens(self) -> list[int]:
        """Return all unread tokens. Raise the error that ended the reply early."""
        tokens: list[int] = []
        while not (output := await self.outputs.get()).is_last:
            tokens += [chunk.token_id for chunk in output.chunks]
        if self.handle.error:
            raise self.handle.error
        return tokens + [chunk.token_id for chunk in output.chunks]


def run(worker: Worker, work: Coroutine[Any, Any, T], grace: float = 5.0) -> T:
    async def main() -> T:
        worker.start()
        try:
            return await asyncio.wait_for(work, 120)
        finally:
            await worker.stop(grace)

    return asyncio.run(main())


def test_concurrent_replies_equal_single_replies() -> None:
    llm, plain = toy(), toy_llm()
    samplings = [Sampling(max_new_tokens=5 + i, temperature=0.3 * (i % 3), seed=i) for i in range(9)]
    prompts = [f"number {'abcdefghi'[i]}, please" for i in range(9)]
    worker = Worker(llm, WorkerLimits(slots=4, prefill_quota=8, prefix_bytes=1 << 20))

    async def work() -> list[list[int]]:
        replies = [
            Reading(worker, job(llm, prompt, how, SPECULATION_OFF if i % 3 == 0 else None))
            for i, (prompt, how) in enumerate(zip(prompts, samplings, strict=True))
        ]
        return await asyncio.gather(*(reply.tokens() for reply in replies))

    assert run(worker, work()) == [plain.generate(p, how).token_ids for p, how in zip(prompts, samplings, strict=True)]


def test_so_many_and_no_more() -> None:
    llm = toy()
    worker = Worker(llm, WorkerLimits(slots=1, queue=2))

    async def work() -> None:
        how = Sampling(max_new_tokens=30, ignore_eos=True)
        replies = [Reading(worker, job(llm, "abc", how)) for _ in range(3)]
        with pytest.raises(Busy, match="3 replies are running or waiting"):
            Reading(worker, job(llm, "abc", how))
        assert len({tuple(await reply.tokens()) for reply in replies}) == 1
        assert len(await Reading(worker, job(llm, "abc", how)).tokens()) == 30

    run(worker, work())
    assert worker.load.running == worker.load.waiting == 0
    assert worker.load.cache == 0.0


def test_nothing_of_a_prompt_counts_as_read_before_it_is_considered() -> None:
    llm = toy()
    one = Reading(Worker(llm), job(llm, "a prompt", Sampling(max_new_tokens=1)))
    assert one.handle.read == 0


def test_a_client_that_leaves_gives_its_slot_back() -> None:
    llm = toy()
    worker = Worker(llm, WorkerLimits(slots=1))

    async def work() -> None:
        endless = Sampling(max_new_tokens=100, ignore_eos=True)
        leaving = Reading(worker, job(llm, "abc", endless))
        await leaving.outputs.get()
        leaving.handle.cancel()
        assert len(await Reading(worker, job(llm, "abc", endless)).tokens()) == 100

    run(worker, work())
    assert not any(llm.engine.cache.lengths)


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_stopping_the_server_ends_its_replies(grace: float) -> None:
    """With enough time the replies are completed. Otherwise they end with an error."""
    llm = toy()
    worker = Worker(llm, WorkerLimits(slots=2))

    async def work() -> tuple[list[int], Exception | None]:
        reply = Reading(worker, job(llm, "abc", Sampling(max_new_tokens=100, ignore_eos=True)))
        first = await reply.outputs.get()
        worker.drain(grace)
        with pytest.raises(ServerStopping):
            Reading(worker, job(llm, "abc", Sampling()))
        return [first.chunks[0].token_id, *await reply.tokens()], reply.handle.error

    tokens, error = run(worker, work(), grace)
    assert (len(tokens) >= 100) == (grace > 0)
    assert error is None


def test_a_broken_round_ends_only_its_own_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a failure of the scheduler itself, not of a request. It leaves no trace, and the next request works."""
    llm = toy()
    worker = Worker(llm)
    honest, broken = Scheduler.turn, [True]

    def turn(self: Scheduler) -> Any:
        events = honest(self)
        if broken and any(chunks for _, chunks in events):
            broken.clear()
            raise RuntimeError("lost")
        return events

    monkeypatch.setattr(Scheduler, "turn", turn)

    async def work() -> list[int]:
        how = Sampling(max_new_tokens=5, ignore_eos=True)
        with pytest.raises(RuntimeError, match="lost"):
            await Reading(worker, job(llm, "abc", how)).tokens()
        return await Reading(worker, job(llm, "abc", how)).tokens()

    assert len(run(worker, work())) == 5
    assert not any(llm.engine.cache.lengths)


def test_replies_ended_by_a_broken_turn_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replies end in one turn, and the second end fails: no client waits forever, and no slot is lost."""
    llm = toy_llm()
    worker = Worker(llm)
    honest, ended = Engine.finish, []

    def finish(self: Engine, request: Request) -> None:
        honest(self, request)
        ended.append(request)
        if len(ended) == 2:
            raise RuntimeError("lost")

    monkeypatch.setattr(Engine, "finish", finish)
    monkeypatch.setattr(ReadingPace, "limit", lambda self, running: math.inf)  # so that all three end in the same turn

    async def work() -> list[Any]:
        how = Sampling(max_new_tokens=5, ignore_eos=True)
        with worker._changed:  # all three reach the engine's thread at once
            replies = [Reading(worker, job(llm, "abc", how)) for _ in range(3)]
        read_all = asyncio.gather(*(reply.tokens() for reply in replies), return_exceptions=True)
        broken = await asyncio.wait_for(read_all, 20)
        assert len(await Reading(worker, job(llm, "abc", how)).tokens()) == 5
        return broken

    assert [str(error) for error in run(worker, work())] == ["lost"] * 3
    assert worker.load.running == worker.load.waiting == 0
    assert not any(llm.engine.cache.lengths)


class Fails(DrafterWrapper):
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        raise ValueError("a drafter that fails")


def test_one_reply_fails_and_the_rest_is_as_it_would_be() -> None:
    llm = LLM(toy_model(), {"suffix": Suffix(), "fails": Fails(Suffix())}, DraftBudget.chain(3))
    worker = Worker(llm)
    how = Sampling(max_new_tokens=12, ignore_eos=True)

    async def work() -> list[Any]:
        jobs = [job(llm, "abc", how, Speculation(name)) for name in ("suffix", "fails", "suffix")]
        return await asyncio.gather(*(Reading(worker, one).tokens() for one in jobs), return_exceptions=True)

    first, error, last = run(worker, work())
    assert first == last == toy_llm().generate("abc", how).token_ids
    assert isinstance(error, ValueError)


def test_each_round_has_its_own_count_of_drafted_tokens() -> None:
    """This holds however far the engine is ahead. Here, the reply is complete before its first round is read."""
    twin = DraftModel(tiny_target(layers=1), tiny_target(layers=1).vocab_size)
    llm = LLM(toy_model(), {"twin": twin}, DraftBudget.chain(2))
    worker = Worker(llm)
    metrics = Metrics(lambda _: worker.load)
    request = RunningRequest("id", LoadedModel("toy", worker, metrics), RequestLimit(1), Tracer())

    async def work() -> list[ReplyRound]:
        how = Sampling(max_new_tokens=24, ignore_eos=True)
        request.start([job(llm, "hello hello", how, Speculation("twin", DraftBudget.chain(2)))])
        while worker.load.running or worker.load.waiting:
            await asyncio.sleep(0.01)
        rounds = [made async for made in request.rounds()]
        request.close()
        return rounds

    rounds = run(worker, work())
    assert sum(len(made.chunks) for made in rounds) == 24
    assert all(made.accepted <= made.drafted <= 2 for made in rounds)
    stats = request.handles[0].stats
    assert len(rounds) == stats.rounds > 1
    assert sum(made.drafted for made in rounds) == stats.drafted > 2


def test_a_name_that_is_not_loaded_is_refused_at_once() -> None:
    llm = toy()
    worker = Worker(llm)
    with pytest.raises(ValueError, match="no drafter 'nobody' is loaded"):
        Reading(worker, job(llm, "abc", Sampling(), Speculation("nobody")))


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    with packaged_model("demo"):
        yield load(
            "demo", quantize="int8", drafter=["suffix", "ngram", "eagle3", "medusa", "early-exit:10", "suffix+eagle3"]
        )


@pytest.mark.slow
@pytest.mark.model
def test_concurrent_replies_of_the_real_model_equal_single_replies(real: LLM) -> None:
    """There are random arrivals, mixed parameters, every drafter, and a prefix cache. Token ids are equal if the
    self-check promises the same bits."""
    chance = random.Random(7)
    topics = ["tides", "bread", "a lost key", "prime numbers", "rain", "chess", "tea", "the moon"]
    prompts = [f"Tell me about {topics[i % 8]}. Then say it again, word for word." for i in range(12)]
    samplings = [
        Sampling(
            max_new_tokens=16,
            temperature=chance.choice([0.0, 0.0, 0.8]),
            top_p=chance.choice([1.0, 0.9]),
            presence_penalty=chance.choice([0.0, 0.5]),
            seed=i,
        )
        for i in range(12)
    ]
    names = [policy.name for policy in real.engine.policies]
    hows = [
        Speculation(names[i % len(names)], chance.choice([None, DraftBudget.chain(3), DraftBudget(9, 3, 3)]))
        for i in range(12)
    ]
    plain = LLM(real.model)
    alone = [plain.generate(p, how).token_ids for p, how in zip(prompts, samplings, strict=True)]
    worker = Worker(real, WorkerLimits(slots=5, prefill_quota=32, prefix_bytes=64 << 20))

    async def one(i: int) -> list[int]:
        await asyncio.sleep(chance.random())
        return await Reading(worker, job(real, prompts[i], samplings[i], hows[i])).tokens()

    async def work() -> list[list[int]]:
        return await asyncio.gather(*map(one, range(12)))

    together = run(worker, work())
    if plain.guarantee == "bits":
        assert together == alone
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 10
    assert real.engine.prefixes is not None
    assert real.engine.prefixes.hits > 0


def test_a_worker_at_rest_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_IDLE_TRIM", 0.05)
    given = list[int]()
    monkeypatch.setattr(workers, "trim_memory", lambda: given.append(len(given)))
    llm = toy()
    worker = Worker(llm)

    async def rest(times: int) -> None:
        while len(given) < times:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(given) == times

    async def work() -> None:
        await rest(1)
        await Reading(worker, job(llm, "hello", Sampling(max_new_tokens=4))).tokens()
        await rest(2)

    run(worker, work())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library cannot be asked")
def test_gaps_between_what_is_in_use_are_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    resident = psutil.Process().memory_info
    blocks = [libc.malloc(1 << 16) for _ in range(2048)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 16)
    last = blocks.pop()  # it stays in use above the freed blocks, so `free` returns none of them to the system
    for block in blocks:
        libc.free(block)
    before = resident().rss
    trim_memory()
    after = resident().rss
    libc.free(last)
    assert before - after > 64 << 20


def test_states_take_memory_in_addition_to_keys_and_values() -> None:
    """Many short texts have more states than positions."""
    lengths, states = [300, 40, 5000], max_states(300) + max_states(40) + max_states(5000)
    assert _positions(0.0, False, lengths) == 5340
    assert _positions(100.0, False, lengths) == 5340 + states * 100
    assert _fits(5340, partial(_positions, 0.0, False), lengths)
    assert not _fits(5340, partial(_positions, 100.0, False), lengths)


def test_each_slot_of_a_rectangular_cache_takes_as_much_as_the_longest() -> None:
    assert _positions(0.0, True, [300, 40, 100]) == 4 * 300, "the number of slots doubles"
    assert _positions(0.0, True, []) == _positions(0.0, False, []) == 0


@pytest.mark.parametrize("kind", [SlabCache, SharedSlabCache])
def test_a_long_text_takes_room_in_its_own_slot_only(kind: type[SlabCache]) -> None:
    model = toy_model(context_length=2048)
    model.target._cache_type = kind  # type: ignore[attr-defined]
    worker = Worker(LLM(model), WorkerLimits(cache_positions=2000))
    lengths = [1000, *[60] * 15]
    assert worker._scheduler._fits(lengths) == (kind is SlabCache)
    assert not worker._scheduler._fits([*lengths, 101])
