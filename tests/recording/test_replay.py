"""A replay's counts equal the counts of real replies. One test proves that this check can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paceline.bench.replay.run import Replayer, ReplayResult, Slowdown
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.block import Block
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack, DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.models.heads import ExitConfig
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply
from paceline.recording.states import StateFiles, StateKeeper, states_folder
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget
from tests.support.cover import cover
from tests.support.tiny_heads import TINY_BLOCK, TINY_MEDUSA, block_tensors, eagle_config, eagle_tensors, fitted_medusa
from tests.support.toys import toy_foreigner, toy_model, toy_target

MODEL = toy_model(layers=2)
TOY: Any = MODEL.target
OTHER = toy_target(seed=9, layers=1)
EAGLE, EAGLE_1 = eagle_config(), eagle_config(version=1)
FOREIGN = VocabMap(MODEL, toy_foreigner(seed=9))
PROMPTS: list[list[int]] = [[1, 5, 9, 5, 9, 5, 2, 1, 5, 9], [7, 8, 9], list(range(30)), [4] * 12, [3]]
KNOWN = LLM(MODEL).generate(PROMPTS[0], Sampling(max_new_tokens=22, ignore_eos=True)).token_ids

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "suffix that remembers": lambda: Suffix(remember=True),
    "the model itself": lambda: DraftModel(TOY, 37),
    "another model": lambda: DraftModel(OTHER, 37),
    "another model with its own tokenizer": lambda: SharedTokenDrafter(FOREIGN),
    "another model's text": lambda: TextDrafter(FOREIGN),
    "eagle-3": lambda: Eagle(EAGLE, eagle_tensors(EAGLE), TOY),
    "eagle-1": lambda: Eagle(EAGLE_1, eagle_tensors(EAGLE_1), TOY),
    "medusa": lambda: Medusa(TINY_MEDUSA, fitted_medusa(TOY, [PROMPTS[0] + KNOWN]), TOY),
    "block": lambda: Block(TINY_BLOCK, block_tensors(), TOY),
    "stack": lambda: DrafterStack([Suffix(), Eagle(EAGLE, eagle_tensors(EAGLE), TOY)]),
}
SIZES = {"chain": DraftBudget.chain(5), "tree": DraftBudget(14, 4, 3)}
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=20, seed=0, ignore_eos=True),
    "warm": Sampling(max_new_tokens=20, temperature=0.7, top_p=0.9, seed=11),
    "hot": Sampling(max_new_tokens=20, temperature=1.0, seed=12, ignore_eos=True),
    "penalties and bans": Sampling(
        max_new_tokens=20,
        temperature=1.0,
        top_p=0.95,
        seed=13,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        bad_words=["ab", [5, 9]],
        logit_bias={7: 2.0, 8: float("-inf")},
        min_new_tokens=9,
        no_repeat_ngram_size=3,
    ),
    "stop strings": Sampling(max_new_tokens=20, temperature=1.0, seed=14, stop=["e", "gh"], stop_token_ids=[30]),
}


def counts(stats: Sequence[Stats]) -> list[Any]:
    return [(s.rounds, s.tokens, s.drafted, s.accepted, s.accepted_at) for s in stats]


def samplings(sampling: Sampling) -> list[Sampling]:
    return [replace(sampling, seed=(sampling.seed or 0) + i, max_new_tokens=20 - 2 * i) for i in range(len(PROMPTS))]


def recorded(path: Path, sampling: Sampling, model: Loaded = MODEL, width: int = 1) -> list[RecordedReply]:
    """Return replies that were generated without drafts."""
    llm = LLM(model)
    with llm.record(path):
        llm.generate(PROMPTS, samplings(sampling), width=width)
    return Recording(path)[:]


@cache
def recorded_once(sampling: str) -> list[RecordedReply]:
    """Return the replies for one of `SAMPLINGS`, generated once per process."""
    with TemporaryDirectory() as folder:
        return recorded(Path(folder) / "r.jsonl", SAMPLINGS[sampling])


def real(drafter: Drafter, size: DraftBudget | None, sampling: Sampling, width: int = 1) -> list[Stats]:
    llm = LLM(MODEL, drafter, size)
    return [c.stats for c in llm.generate(list(PROMPTS), samplings(sampling), width=width)]


@cover(
    name=DRAFTERS.keys(),
    sampling=SAMPLINGS.keys(),
    size=SIZES,
    width={"1": 1, "3": 3},
    together=[("name",), ("sampling",), ("size", "width")],
)
def test_counts_are_equal(name: str, sampling: str, size: DraftBudget, width: int) -> None:
    replies = recorded_once(sampling)
    stats = real(DRAFTERS[name](), size, SAMPLINGS[sampling], width)
    replayed = Replayer(MODEL, width=width).run(replies, DRAFTERS[name](), size)
    assert counts(replayed.stats) == counts(stats)
    assert replayed.tokens == sum(len(reply.reply) for reply in replies)
    assert sum(s.drafted for s in replayed.stats) > 0


@pytest.mark.parametrize("sampling", ["greedy", "stop strings"])
def test_states_stored_while_writing_spare_a_prefill(
    sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    files = StateFiles(states_folder(path), EAGLE.taps, 1 << 30)
    keeping = LLM(MODEL, StateKeeper(files), DraftBudget.chain(0))
    with keeping.record(path):
        keeping.generate(list(PROMPTS), samplings(SAMPLINGS[sampling]), width=3)
    replies = Recording(path)[:]
    computed = Replayer(MODEL).run(replies, DRAFTERS["eagle-3"](), SIZES["tree"])
    monkeypatch.setattr("paceline.bench.replay.text_target.TargetStates._compute", None)
    stored = Replayer(MODEL, states=states_folder(path)).run(replies, DRAFTERS["eagle-3"](), SIZES["tree"])
    assert counts(stored.stats) == counts(computed.stats)
    for reply in replies:  # replies to another text
        states = files.read(reply.token_ids[:-2])
        assert states
        assert files.write(reply.token_ids[:-2], {tap: x.flip(0) for tap, x in states.items()})
    wrong = Replayer(MODEL, states=states_folder(path)).run(replies, DRAFTERS["eagle-3"](), SIZES["tree"])
    assert counts(wrong.stats) != counts(computed.stats)


@pytest.mark.slow
def test_something_is_accepted_by_every_kind() -> None:
    """Otherwise, equal counts would prove little."""
    replies = recorded_once("greedy")
    for name, make in DRAFTERS.items():
        replayed = Replayer(MODEL).run(replies, make(), SIZES["tree"])
        assert sum(s.accepted for s in replayed.stats) > 0, name


def test_samples_of_one_prompt_and_a_memory_of_earlier_replies(tmp_path: Path) -> None:
    llm, how = LLM(MODEL), Sampling(max_new_tokens=16, temperature=0.6, seed=3)
    with llm.record(tmp_path / "r.jsonl"):
        llm.generate(PROMPTS[0], how, n=4, width=2)
    replies = Recording(tmp_path / "r.jsonl")[:]
    assert sorted(reply.sample for reply in replies) == [0, 1, 2, 3]
    for name in ("suffix that remembers", "eagle-3"):
        drafting = LLM(MODEL, DRAFTERS[name](), SIZES["chain"])
        stats = [c.stats for c in drafting.generate(PROMPTS[0], how, n=4, width=2)]
        assert counts(Replayer(MODEL, width=2).run(replies, DRAFTERS[name](), SIZES["chain"]).stats) == counts(stats)


def test_a_prefix_cache_changes_what_is_fed_and_no_count() -> None:
    replies = recorded_once("warm") * 2
    plain = Replayer(MODEL).run(replies, DRAFTERS["eagle-3"](), DraftBudget.chain(2))
    cached = Replayer(MODEL, prefix_bytes=1 << 30).run(replies, DRAFTERS["eagle-3"](), DraftBudget.chain(2))
    assert counts(cached.stats) == counts(plain.stats)
    # In float64, prompts are only cut at whole chunks. The engine's own counts are the reference.
    llm = LLM(MODEL, DRAFTERS["eagle-3"](), DraftBudget.chain(2))
    llm.engine.remember(1 << 30)
    found = [llm.generate(PROMPTS[i], how).stats for i, how in [*enumerate(samplings(SAMPLINGS["warm"]))] * 2]
    assert [s.cached for s in cached.stats] == [s.cached for s in found]


def test_grammars_force_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    from paceline.sampling.grammar import Grammar

    how = Sampling(max_new_tokens=30, temperature=1.0, seed=5, grammar=Grammar.regex("(abcab ){3}[a-h]{4,9}"))
    replies = recorded(tmp_path / "r.jsonl", how)
    assert replies[0].sampling.grammar == how.grammar
    stats = real(Suffix(), SIZES["chain"], how)
    assert counts(Replayer(MODEL).run(replies, Suffix(), SIZES["chain"]).stats) == counts(stats)
    assert max(s.accepted for s in stats) > 10, "forced tokens"


@pytest.mark.parametrize(
    ("name", "sampling"), [("suffix", "greedy"), ("medusa", "greedy"), ("the model itself", "hot")]
)
def test_another_token_gives_other_counts(name: str, sampling: str) -> None:
    """This is a negative control."""
    replies = recorded_once(sampling)[:1]
    reply = list(replies[0].reply)
    reply[10] = (reply[10] + 1) % 36
    changed = [replace(replies[0], reply=tuple(reply))]
    same, other = (Replayer(MODEL).run(rows, DRAFTERS[name](), SIZES["tree"]).stats for rows in (replies, changed))
    assert counts(same) != counts(other)


def test_another_seed_gives_other_counts() -> None:
    """This is a negative control: drafters share the noise of the seed."""
    replies = recorded_once("hot")
    seeded = [replace(r, sampling=replace(r.sampling, seed=99)) for r in replies]
    same, other = (Replayer(MODEL).run(rows, DraftModel(TOY, 37), SIZES["chain"]) for rows in (replies, seeded))
    assert same.rounds == sum(-(-len(reply.reply) // 6) for reply in replies), "the model itself is always right"
    assert other.rounds > 2 * same.rounds


def test_the_recording_does_not_depend_on_drafts_or_batches(tmp_path: Path) -> None:
    """A recording with drafts, in a batch, has the same rows except for times."""
    plain = recorded_once("warm")
    llm = LLM(MODEL, DRAFTERS["eagle-3"](), SIZES["tree"])
    with llm.record(tmp_path / "b.jsonl"):
        llm.generate(PROMPTS, samplings(SAMPLINGS["warm"]), width=5)
    drafted = Recording(tmp_path / "b.jsonl")[:]
    assert [replace(r, started=0) for r in drafted] == [replace(r, started=0) for r in plain]


def test_early_exit_is_refused() -> None:
    replies = recorded_once("greedy")
    with pytest.raises(InvalidOption, match="the target's own layers cannot be replayed"):
        Replayer(MODEL).run(replies, EarlyExit(ExitConfig(32, 1), {}, TOY), SIZES["chain"])


# --- time ----------------------------------------------------------------------------------------------------------


class Prices:
    """A pass costs 10 s plus 1 s per row, a prompt token 0.1 s, and a choice 0.5 s."""

    position_bytes = 1

    def round(self, rows: int, before: Sequence[int]) -> float:
        return 10.0 + rows

    def prefill(self, tokens: int, before: int) -> float:
        return 0.1 * tokens

    def choice(self, sampling: Sampling) -> float:
        return 0.5


class Ticking(DrafterWrapper):
    """Drafts with a cost of two seconds per level."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.now = 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.now += 2.0 * asks[0].budget.depth
        return super().propose(asks)


def ticking(
    replies: Sequence[RecordedReply], size: DraftBudget | None, draft: float = 1.0, verify: float = 1.0
) -> ReplayResult:
    drafter = Ticking(DraftModel(TOY, 37))
    return Replayer(MODEL, Prices(), timer=lambda: drafter.now).run(replies, drafter, size, Slowdown(draft, verify))


def test_a_reply_takes_what_its_parts_cost() -> None:
    replies = recorded_once("greedy")[:1]
    plain = Replayer(MODEL, Prices()).run(replies)
    assert plain.seconds == pytest.approx(0.9 + 20 * (10 + 1 + 0.5))
    fed = ticking(replies, DraftBudget.chain(4))
    (stats,) = fed.stats
    assert stats.tokens == 20
    assert stats.rounds == 4, "the model itself is always right"
    assert stats.seconds["prefill"] == pytest.approx(0.9)
    assert stats.seconds["draft"] == pytest.approx(4 * 2 * 4)
    assert stats.seconds["verify"] == pytest.approx(4 * (10 + 5) + 20 * 0.5)
    assert fed.seconds == pytest.approx(sum(stats.seconds.values())) == pytest.approx(sum(fed.reply_seconds))
    assert fed.rows == 4 * 5
    assert fed.draft_seconds == [8.0] * 4
    slow = ticking(replies, DraftBudget.chain(4), 1.5, 1.1).stats[0].seconds
    assert slow["draft"] == pytest.approx(1.5 * 4 * 8)
    assert slow["verify"] == pytest.approx(1.1 * 4 * (10 + 5) + 20 * 0.5)


def test_the_controller_goes_by_prices() -> None:
    replies = recorded_once("greedy")
    free, dear = ticking(replies, None, 0.01), ticking(replies, None, 50.0)
    assert sum(s.drafted for s in dear.stats) < sum(s.drafted for s in free.stats) / 3
    assert counts(ticking(replies, None).stats) == counts(ticking(replies, None).stats), "and by nothing else"
