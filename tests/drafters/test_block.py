"""The block drafter compared with a dense version of the same network, over the whole text at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.slab import SlabCache
from paceline.drafters.base import Ask
from paceline.drafters.block import Block
from paceline.drafters.independent import draft_independently
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.stats import Stats
from paceline.errors import CorruptModel
from paceline.models.block import BlockNetwork
from paceline.models.config import LayerConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import check_drafter, run, run_together, tiny_target
from paceline.types import DraftBudget, Tap, Verdict
from paceline.verify.tree import PREFILL_ROWS, depths, shape
from tests.support.dense_block import Dense, taps_of
from tests.support.tiny_heads import TINY_BLOCK, block_tensors
from tests.support.toys import ask_for

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
ROPE = RopeConfig(theta=500.0)
WINDOWED = replace(
    TINY_BLOCK,
    layer=replace(TINY_BLOCK.layer, special=(LayerConfig(ROPE, window=7), LayerConfig(ROPE))),
    causal=(True, False),
)
NARROW = replace(WINDOWED, causal=(), from_anchor=True)
CONFIGS = {"full": TINY_BLOCK, "causal windows": WINDOWED, "mutual windows, from the anchor": NARROW}


def block(config: BlockConfig = TINY_BLOCK, target: Decoder = TOY, seed: int = 0, **tensors: Tensor) -> Block:
    made = block_tensors(config, seed) | tensors
    return Block(config, made, target)


def expected(dense: Dense, text: Sequence[int], depth: int) -> Tensor:
    """Return the logits [depth, V] that the drafter should compute after a text."""
    features = taps_of(dense.target, text, dense.config.taps)  # type: ignore[arg-type]
    first = 0 if dense.config.from_anchor else 1
    return dense(text, [len(text) - 1], features)[0, first : first + depth]


class Watched(Block):
    """Records the guesses and the texts before them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[tuple[list[int], Tensor]] = []

    def _read(self, asks: Sequence[Ask], depth: int) -> Tensor:
        states = super()._read(asks, depth)
        logits = self._network.logits(states)
        self.seen += [(list(ask.token_ids), row) for ask, row in zip(asks, logits, strict=True)]
        return states


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_guesses_in_every_round_equal_guesses_from_the_whole_text(config: BlockConfig) -> None:
    """Ragged requests share rounds, over many rounds that catch up with partly accepted trees."""
    tensors = {name: tensor.double() for name, tensor in block_tensors(config).items()}
    drafter = Watched(config, tensors, TOY)
    prompts = [PROMPT, [3], PROMPT * 5, [7, 7, 8]]
    samplings = [Sampling(max_new_tokens=14, temperature=0.8, seed=seed) for seed in range(4)]
    run_together(Engine(TOY, drafter, DraftBudget(8, 4, 2)), prompts, samplings)
    assert len(drafter.seen) > 20
    dense = Dense(config, tensors, TOY)
    for text, logits in drafter.seen:
        torch.testing.assert_close(logits, expected(dense, text, len(logits)), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("config", [WINDOWED, NARROW], ids=["causal windows", "from the anchor"])
def test_block_drafters_of_other_kinds_keep_the_contract(config: BlockConfig) -> None:
    check_drafter(lambda: block(config))


def test_few_hidden_states_are_kept_without_requests_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.cached.MAX_PENDING", PREFILL_ROWS)
    drafter = block(target=tiny_target(context_length=2048))
    drafter.admit(0, [3])
    states = {tap: torch.ones(3, TOY.config.hidden, dtype=TOY.dtype) for tap in drafter.taps}
    for _ in range(PREFILL_ROWS):
        drafter.observe(0, Verdict((1, 2), (4, 4, 4)), states)
    state = drafter._slots[0]
    assert len(state.pending) <= PREFILL_ROWS
    assert drafter._cache.lengths[state.cache_slot] + len(state.pending) == 3 * PREFILL_ROWS


def test_drafters_catch_up_during_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's ring buffer wraps several times, and the hidden states of a long prompt are not kept."""
    monkeypatch.setattr("paceline.drafters.cached.MAX_PENDING", PREFILL_ROWS)
    target = tiny_target(context_length=2048)
    tensors = {name: tensor.double() for name, tensor in block_tensors(WINDOWED).items()}
    drafter = Watched(WINDOWED, tensors, target)
    waited = []

    class Noted(Engine):
        def feed(self, request: Request, limit: int = PREFILL_ROWS) -> int:
            fed = super().feed(request, limit)
            if fed and self.cache.lengths[request.slot] == request.position:
                waited.append(len(drafter._slots[request.slot].pending))
            return fed

    prompts = [[i * i % 37 for i in range(length)] for length in (1400, 90)]
    run_together(Noted(target, drafter, DraftBudget.chain(4)), prompts, [Sampling(max_new_tokens=6)] * 2)
    assert waited[0] <= PREFILL_ROWS
    assert waited[1] == 89, "a short prompt waits for the draft"
    dense = Dense(WINDOWED, tensors, target)
    assert {len(text) > 1400 for text, _ in drafter.seen} == {True, False}
    for text, logits in drafter.seen:
        torch.testing.assert_close(logits, expected(dense, text, len(logits)), atol=1e-3, rtol=0)


def fitted(text: Sequence[int], steps: int = 60) -> Block:
    """Return a drafter that predicts one text exactly from its hidden states and the pending token."""
    config = replace(TINY_BLOCK, size=4)
    tensors = {name: tensor.double().requires_grad_() for name, tensor in block_tensors(config, seed=1).items()}
    dense, features = Dense(config, tensors, TOY), taps_of(TOY, text, (0, 1)).clone()
    starts = range(len(PROMPT) - 1, len(text) - 3)
    wanted = torch.tensor([text[start + 1 : start + 4] for start in starts])
    optimiser = torch.optim.Adam(tensors.values(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(dense(text, starts, features)[:, 1:].flatten(0, 1), wanted.flatten()).backward()
        optimiser.step()
    return block(config, **{name: tensor.detach() for name, tensor in tensors.items()})


HOW = Sampling(max_new_tokens=27, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def knowing() -> Block:
    return fitted(PROMPT + run(TOY, PROMPT, replace(HOW, max_new_tokens=30))[0])


def test_a_head_that_knows_the_text_is_always_right(knowing: Block) -> None:
    for draft in (DraftBudget(8, 3, 3), DraftBudget.chain(3), DraftBudget.chain(2), DraftBudget.chain(1)):
        _, _, stats = run(TOY, PROMPT, HOW, knowing, draft)
        assert stats.rounds == -(-27 // (1 + draft.depth))


@pytest.mark.parametrize("slip", ["position", "place", "context", "row"])
def test_an_off_by_one_anywhere_is_noticed(knowing: Block, slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, read = BlockNetwork.draft, BlockNetwork.read

    def late(self: BlockNetwork, cache: SlabCache, slots: Sequence[int], first: Sequence[int], x: Tensor) -> Tensor:
        return draft(self, cache, slots, [place + 1 for place in first], x)

    def beside(self: BlockNetwork, cache: SlabCache, slots: Sequence[int], first: Sequence[int], x: Tensor) -> Tensor:
        return draft(self, cache, slots, first, x).roll(1, 1)

    def behind(self: BlockNetwork, cache: SlabCache, slots: Sequence[int], x: Tensor, counts: Sequence[int]) -> None:
        read(self, cache, slots, x.roll(1, 1), counts)

    def observe(self: Block, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        shifted = {tap: states[[*verdict.path, 0]] for tap, states in out.items()}
        self._slots[slot].pending.add(self.taps, shifted)

    broken = {
        "position": (BlockNetwork, "draft", late),
        "place": (BlockNetwork, "draft", beside),
        "context": (BlockNetwork, "read", behind),
        "row": (Block, "observe", observe),
    }
    monkeypatch.setattr(*broken[slip])
    tokens, _, stats = run(TOY, PROMPT, HOW, knowing, DraftBudget.chain(3))
    assert tokens == run(TOY, PROMPT, HOW)[0], "a bad drafter costs speed, never text"
    assert stats.tokens_per_round < 3


def test_requests_of_one_round_share_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    for name in ("draft", "read"):
        honest = getattr(BlockNetwork, name)
        monkeypatch.setattr(BlockNetwork, name, lambda s, c, *a, f=honest: passes.append(len(a[0])) or f(s, c, *a))
    prompts = [PROMPT, PROMPT[:4], [3]]
    replies = run_together(Engine(TOY, block(), DraftBudget.chain(4)), prompts, [Sampling(max_new_tokens=12)] * 3)
    assert passes[:4] == [2, 3, 3, 3], "of the shortest prompt there is nothing to read at first"
    assert len(passes) <= 2 * max(stats.rounds for _, _, stats in replies)


def test_drafts_leave_no_state_behind() -> None:
    """A repeated request gets the same draft, also after another budget, and so does an earlier fork."""
    drafter = block()
    engine = Engine(TOY, drafter, DraftBudget.chain(4))
    sampling = Sampling(temperature=0.8, seed=2)
    requests = [engine.start(PROMPT, sampling.sampler(), TextStream(Sampling(), (), str, 50), Stats(2, "rounding"))]
    engine.prefill(requests[0])
    drafter.fork(7, requests[0].slot, PROMPT)
    ask = ask_for(requests[0].slot, DraftBudget.chain(4), sampling, PROMPT)
    first = drafter.propose([ask])
    drafter.propose([replace(ask, budget=DraftBudget(6, 2, 3))])
    assert drafter.propose([ask]) == first == drafter.propose([replace(ask, slot=7)])
    drafter.release(requests[0].slot)
    assert drafter.propose([replace(ask, slot=7)]) == first, "a fork needs its source no more"


def test_draws_of_rejection_come_with_the_q_they_were_drawn_from() -> None:
    """The draft has the budget's shape whatever is drawn. q is the sampler's distribution for the head's logits."""
    tensors = block_tensors()
    drafter = Watched(TINY_BLOCK, tensors, TOY)
    budget = DraftBudget(9, 3, 3)
    for seed in range(3):
        sampling = Sampling(temperature=0.7, top_k=9, seed=seed, rule="rejection")
        drafter.admit(0, PROMPT)
        (draft,) = drafter.propose([ask_for(0, budget, sampling, PROMPT)])
        drafter.release(0)
        assert Counter(Counter(draft.parents).values()) == Counter(shape(budget).values())
        assert set(draft.q) == set(draft.parents)
        logits = drafter.seen[-1][1]
        for row, q in draft.q.items():
            torch.testing.assert_close(
                q, sampling.sampler().distribution(Prefix(PROMPT), logits[depths(draft.parents)[row]])
            )


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (replace(TINY_BLOCK, mask_token=37), "mask token"),
        (replace(TINY_BLOCK, size=1), "drafts 0"),
        (replace(TINY_BLOCK, taps=()), "no layer"),
        (replace(TINY_BLOCK, causal=(True,)), "causal"),
        (replace(TINY_BLOCK, layer=replace(TINY_BLOCK.layer, hidden=16)), "hidden size"),
    ],
)
def test_a_head_that_cannot_be_the_targets_is_refused(config: BlockConfig, cause: str) -> None:
    with pytest.raises(CorruptModel, match=cause):
        block(config)


def test_tensors_of_another_head_are_refused() -> None:
    with pytest.raises(CorruptModel, match="extra"):
        block(**{"layers.0.self_attn.extra.weight": torch.ones(3)})
    with pytest.raises(CorruptModel, match="fc"):
        block(**{"fc.weight": torch.ones(32, 96)})


def test_a_separate_head_chooses_from_fewer_tokens() -> None:
    """The guesses equal the target's full head restricted to these tokens."""
    ids = torch.tensor([2, 3, 5, 9, 12, 30, 31])
    head = {"lm_head.weight": TOY.embed(ids), "d2t": ids - torch.arange(7), "t2d": torch.zeros(37, dtype=torch.bool)}
    few, whole = block(replace(TINY_BLOCK, draft_vocab=7), **head), Watched(TINY_BLOCK, block_tensors(), TOY)
    for how in (Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, seed=3, rule="rejection")):
        ask = ask_for(0, DraftBudget(8, 4, 2), how, PROMPT)
        for drafter in (few, whole):
            drafter.admit(0, PROMPT)
        (draft,) = few.propose([ask])
        whole.propose([ask])
        rows = torch.full((4, 37), -torch.inf).double()
        rows[:, ids] = whole.seen[-1][1][:, ids]
        assert draft == draft_independently(ask, ask.budget, rows)
        assert set(draft.tokens) <= set(ids.tolist())
    text = run(TOY, PROMPT, Sampling(max_new_tokens=20))[0]
    assert run(TOY, PROMPT, Sampling(max_new_tokens=20), few, DraftBudget(8, 4, 2))[0] == text
