"""A session's logits depend only on its history, and it feeds no token twice."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.checkpoints.loader import Loaded
from paceline.errors import InvalidOption, OutOfMemory, PacelineError, SessionError
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.session import Session
from paceline.testing import TINY, random_tensors, tiny_target
from paceline.types import Draft, Forward, Rows, Want
from paceline.verify.tree import MIN_ROWS, pack_prefix
from tests.support.cover import cover
from tests.support.toys import toy_llm, toy_tokenizer
from tests.support.trees import drafts, path_to

CPU = torch.device("cpu")
LONG = 2048
TREE = Draft((7, 8, 9, 10, 11), (0, 0, 1, 1, 4))


class Toy(Decoder):
    """A float64 decoder that counts its passes."""

    def __init__(self) -> None:
        config = TINY.__class__(**{f: getattr(TINY, f) for f in TINY.__slots__} | {"context_length": LONG})
        super().__init__(config, random_tensors(config), torch.float64, CPU)
        self.passes: list[int] = []

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        assert rows.tokens.shape[1] >= MIN_ROWS
        self.passes.append(rows.tokens.shape[1])
        return super().forward(rows, cache, want)

    def new_cache(self) -> KVCache:
        return self.cache_of([LayerAttention(8**-0.5)] * 2)

    @staticmethod
    def cache_of(layers: list[LayerAttention], kind: type[SlabCache] = SlabCache) -> SlabCache:
        return kind(layers, 2, 8, LONG, torch.float64, CPU)


class Forgetful(SlabCache):
    """A cache that cannot truncate: truncation deletes everything."""

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.lengths[slot]
        super().truncate(slot, length if length == self.lengths[slot] else 0)


class ForgetfulToy(Toy):
    def new_cache(self) -> KVCache:
        return self.cache_of([LayerAttention(8**-0.5)] * 2, Forgetful)


class WindowedToy(Toy):
    def new_cache(self) -> KVCache:
        return self.cache_of([LayerAttention(8**-0.5, window=16), LayerAttention(8**-0.5)])


TOYS: dict[str, Toy] = {"plain": Toy(), "forgetful": ForgetfulToy(), "windowed": WindowedToy()}


def session(kind: str = "plain") -> tuple[Session, list[int]]:
    """Return a session, and a list that receives the row counts of its passes."""
    target = TOYS[kind]
    target.passes = []
    return LLM(Loaded(target, toy_tokenizer(), (36,), {}, Path("toy"))).session(), target.passes


def text(length: int) -> list[int]:
    return [(i * i + 3 * i) % 37 for i in range(length)]


_known: dict[Any, torch.Tensor] = {}
_begun: dict[str, tuple[SlabCache, int]] = {}
"""A cache of each kind whose slot holds text(500), so that long histories need not begin from nothing."""


def feed(tokens: list[int], cache: SlabCache, slot: int, target: Toy) -> torch.Tensor:
    """Return the logits [V] after the slot's tokens and these tokens, without a draft."""
    for first in range(0, len(tokens), 200):
        chunk = tokens[first : first + 200]
        rows = pack_prefix(chunk, slot, cache.lengths[slot], CPU)
        logits = Decoder.forward(target, rows, cache, Want()).logits[0]
        cache.commit(rows, [range(1, len(chunk))])
    return logits[len(chunk) - 1]


def fresh(tokens: list[int], kind: str = "plain") -> torch.Tensor:
    """Return the logits [V] after the tokens, in a new slot."""
    kind = "windowed" if kind == "windowed" else "plain"
    key = (kind, *tokens)
    if key not in _known:
        target, long = TOYS[kind], tokens[:500] == text(500) and len(tokens) > 500
        if kind not in _begun:
            cache = cast(SlabCache, target.new_cache())
            _begun[kind] = cache, cache.acquire()
            feed(text(500), *_begun[kind], target)
        cache, base = _begun[kind]
        slot = cache.fork(base) if long else cache.acquire()
        _known[key] = feed(tokens[500:] if long else tokens, cache, slot, target)
        cache.release(slot)
    return _known[key]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_logits_depend_on_the_history_and_reading_does_not_advance_it() -> None:
    s, _ = session()
    s.observe(text(9))
    close(s.next_logits(), fresh(text(9)))
    chain = s.logits_after([1, 2, 3])
    assert chain.shape == (4, 37)
    for i in range(4):
        close(chain[i], fresh([*text(9), *[1, 2, 3][:i]]))
    tree = s.tree_logits(TREE)
    assert tree.shape == (6, 37)
    for row in range(6):
        path = [TREE.tokens[r - 1] for r in path_to(TREE, row)[-2::-1]]
        close(tree[row], fresh([*text(9), *path]))
    assert s.history == text(9)


def test_a_loop_feeds_one_row_per_token_and_no_token_twice() -> None:
    s, passes = session()
    s.observe(text(300))
    for _ in range(5):
        s.observe([int(s.next_logits().argmax())])
        s.next_logits()
    assert passes == [256, 43, *[MIN_ROWS] * 6]


def test_observing_what_was_scored_costs_no_pass() -> None:
    s, passes = session()
    s.observe(text(9))
    s.logits_after([1, 2, 3, 4])
    assert passes == [8, 5]
    for token in (1, 2):
        s.observe([token])
        close(s.next_logits(), fresh(s.history))
    close(s.logits_after([3, 4])[2], fresh([*s.history, 3, 4]))
    s.rollback_to(9)
    s.observe([1])
    close(s.next_logits(), fresh(s.history))
    assert passes == [8, 5], "all of it was scored"
    s.observe([2, 3, 30])
    close(s.next_logits(), fresh(s.history))
    assert passes == [8, 5, 4], "the scored rows were committed, and only the last token was new"


def test_a_path_of_a_tree_is_committed_and_what_leaves_it_is_fed() -> None:
    s, passes = session()
    s.observe(text(9))
    s.tree_logits(TREE)
    s.observe([7, 10])
    close(s.next_logits(), fresh(s.history))
    s.observe([11, 20, 21, 22])
    assert passes == [8, 6]
    close(s.next_logits(), fresh(s.history))
    assert passes == [8, 6, 4], "two left over, in the pending one's pass"


def test_a_token_after_a_rollback_costs_one_pass() -> None:
    s, passes = session()
    s.observe(text(9)[:4])
    for token in text(9)[4:]:
        s.next_logits()
        s.observe([token])
    s.next_logits()
    for length, more in ((9, [3]), (8, [4]), (6, [5, 6]), (6, [7, 8, 9])):
        s.rollback_to(length)
        s.observe(more)
        passes.clear()
        close(s.next_logits(), fresh(s.history))
        assert passes == [4]
        assert s.hidden(["final"])["final"].shape == (1, 32)
        passes.clear()
        close(s.logits_after([1, 2])[2], fresh([*s.history, 1, 2]))
        assert passes == [4]


def test_a_rollback_into_the_prompt_feeds_it_as_a_prompt_again() -> None:
    s, passes = session()
    s.observe(text(9))
    s.next_logits()
    s.rollback_to(5)
    s.observe(text(9)[5:])
    passes.clear()
    close(s.next_logits(), fresh(s.history))
    assert passes == [4, 4], "the prompt's last tokens, then the pending one"


def test_hidden_states_follow_the_rows_asked_for_last() -> None:
    s, passes = session()
    s.observe(text(9))
    rows = s.logits_after([1, 2])
    states = s.hidden((1, "final"))
    assert {tap: x.shape for tap, x in states.items()} == {1: (3, 32), "final": (3, 32)}
    close(states["final"] @ TOYS["plain"]._embed.T, rows)
    assert len(passes) == 3, "the first time costs a pass"
    s.observe([1, 2])
    last = s.hidden(["final"])["final"]
    assert last.shape == (1, 32)
    close(last[0], states["final"][2])
    s.tree_logits(TREE)
    assert s.hidden([1])[1].shape == (6, 32)
    assert len(passes) == 4, "from then on the taps come along"
    with pytest.raises(SessionError, match="no tap 99"):
        s.hidden([99])
    s.next_logits()
    assert s.hidden(["final"])["final"].shape == (1, 32)


def test_a_snapshot_brings_back_text_and_results() -> None:
    s, passes = session()
    s.observe(text(9))
    s.logits_after([1, 2])
    s.observe([1])
    before, moment = s.next_logits(), s.snapshot()
    s.observe([5, 6, 7])
    s.next_logits()
    s.rollback_to(3)
    s.observe([30, 31])
    s.next_logits()
    count = len(passes)
    s.restore(moment)
    assert s.history == [*text(9), 1] == list(moment.history)
    assert torch.equal(s.next_logits(), before)
    assert len(passes) == count, "the logits were in the snapshot"
    close(s.logits_after([2])[1], fresh([*text(9), 1, 2]))
    s.observe([3])
    close(s.next_logits(), fresh([*text(9), 1, 3]))


def test_a_snapshot_may_come_back_while_later_rows_are_at_hand() -> None:
    s, _ = session()
    s.observe(text(9))
    s.logits_after([1, 2])
    s.observe([1])
    moment = s.snapshot()
    s.logits_after([5])
    s.restore(moment)
    close(s.logits_after([6])[1], fresh([*text(9), 1, 6]))


def test_a_loop_may_take_back_its_last_token_and_write_another() -> None:
    s, _ = session()
    s.observe(text(9))
    s.logits_after([1])
    s.rollback_to(8)
    close(s.next_logits(), fresh(text(8)))
    s.observe([30])
    close(s.next_logits(), fresh([*text(8), 30]))
    s.rollback_to(8)
    s.observe([31])
    close(s.next_logits(), fresh([*text(8), 31]))


@pytest.mark.parametrize("length", [503, 508, 511, 512])
def test_drafts_over_the_end_of_a_block_take_more_passes_and_stay_right(length: int) -> None:
    s, passes = session()
    s.observe(text(length))
    s.next_logits()
    before = len(passes)
    chain = [*range(1, 20)]
    for row, logits in enumerate(s.logits_after(chain)):
        close(logits, fresh([*text(length), *chain[:row]]))
    for row, logits in enumerate(s.tree_logits(TREE)):
        close(logits, fresh([*text(length), *[TREE.tokens[r - 1] for r in path_to(TREE, row)[-2::-1]]]))
    assert len(passes) > before + 2
    s.observe([7, 10, 3])
    close(s.next_logits(), fresh(s.history))
    long = s.logits_after(text(400))
    close(long[400], fresh([*s.history, *text(400)]))


def test_a_window_that_moved_on_is_fed_again() -> None:
    s, passes = session("windowed")
    s.observe(text(1200))
    s.next_logits()
    s.rollback_to(40)
    close(s.next_logits(), fresh(text(40), "windowed"))
    assert passes[-2:] == [39, MIN_ROWS]
    s.observe(text(1200)[40:])
    close(s.next_logits(), fresh(text(1200), "windowed"))
    count = len(passes)
    s.rollback_to(1190)
    s.next_logits()
    assert len(passes) == count + 1, "what the window still holds is kept"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), st.lists(st.integers(0, 4), max_size=4)),
        st.tuples(st.just("chain"), st.lists(st.integers(0, 4), max_size=4)),
        st.tuples(st.just("tree"), drafts(most=7)),
        st.tuples(st.sampled_from(["next", "hidden", "snapshot", "restore"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["rollback", "follow"]), st.integers(0, 5)),
    ),
    min_size=4,
    max_size=14,
)


@cover(kind=[*TOYS], start=[1, 507], together=[("kind",), ("start",)])
@settings(max_examples=settings().max_examples // 3)
@given(steps)
def test_any_order_of_operations_gives_the_logits_of_a_fresh_session(kind: str, start: int, ops: list[Any]) -> None:
    s, _ = session(kind)
    s.observe(text(start))
    history, moments, last = text(start), [s.snapshot()], Draft()
    for name, value in ops:
        if name in ("observe", "follow"):
            if name == "follow":
                value = [last.tokens[r - 1] for r in path_to(last, min(value, len(last.tokens)))[-2::-1]]
            s.observe(value)
            history += value
        elif name == "rollback":
            history = history[: max(1, len(history) - value)]
            s.rollback_to(len(history))
        elif name == "snapshot":
            moments.append(s.snapshot())
        elif name == "restore":
            moment = moments[value % len(moments)]
            s.restore(moment)
            history = list(moment.history)
        else:
            draft = Draft.chain(value) if name == "chain" else value if name == "tree" else Draft()
            logits = s.hidden(["final"])["final"] @ TOYS[kind]._embed.T if name == "hidden" else s.tree_logits(draft)
            if name == "hidden":
                close(logits[0], fresh(history, kind))
                continue
            last = draft
            for row, line in enumerate(logits):
                close(line, fresh([*history, *[draft.tokens[r - 1] for r in path_to(draft, row)[-2::-1]]], kind))
        assert s.history == history
    close(s.next_logits(), fresh(history, kind))


def test_sessions_of_one_model_do_not_disturb_each_other_or_its_replies() -> None:
    llm = toy_llm()
    alone = llm.generate([1, 2, 3], Sampling(max_new_tokens=8)).token_ids
    a, b = llm.session(), llm.session()
    a.observe([1, 2, 3])
    b.observe([4, 5])
    written: list[int] = []
    for _ in llm.stream([1, 2, 3], Sampling(max_new_tokens=8)):
        b.observe([int(b.next_logits().argmax())])
        written.append(int(a.next_logits().argmax()))
        a.observe(written[-1:])
    assert written == alone


def test_a_closed_or_dropped_session_gives_its_memory_back() -> None:
    llm = toy_llm()
    for close_it in (True, False):
        s = llm.session()
        s.observe([1, 2])
        s.next_logits()
        cache = weakref.ref(s._kv())
        if close_it:
            s.close()
            s.close()
        else:
            del s
        gc.collect()
        assert cache() is None


def test_the_rest_of_what_a_loop_needs() -> None:
    with toy_llm().session() as s:
        assert s.encode("ab", raw=True) == [0, 1]
        assert s.decode(s.encode("hello", raw=True)) == "hello"
        assert s.encode([{"role": "user", "content": "a"}]) == toy_llm().encode("a")
        assert (s.vocab_size, s.context_length, s.eos_token_ids) == (37, 256, (36,))
        assert s.history == []
        s.observe([1])
        s.reset()
        assert s.history == []
    assert repr(s) == "Session(0 tokens, closed)"


MISUSE: dict[str, tuple[Any, str]] = {
    "an id below": (lambda s: s.observe([1, -1]), "-1 is not a token id"),
    "an id above": (lambda s: s.observe([37]), "37 is not"),
    "no id": (lambda s: s.observe([True]), "True is not"),
    "text": (lambda s: s.observe("ab"), "must be a list, got str"),
    "a drafted id": (lambda s: s.logits_after([1, 99]), "99 is not"),
    "a negative length": (lambda s: s.rollback_to(-1), "roll back to -1 of 4"),
    "beyond the history": (lambda s: s.rollback_to(5), "5 of 4"),
    "half a length": (lambda s: s.rollback_to(1.5), "1.5"),
    "another's snapshot": (lambda s: s.restore(toy_llm().session().snapshot()), "another session"),
    "too long a text": (lambda s: s.observe([1] * LONG), "context of 2048"),
    "too long a draft": (lambda s: s.logits_after([1] * (LONG - 3)), "2045 tokens after 4"),
    "no tree": (lambda s: s.tree_logits(Draft((1, 1), (0, 0))), "drafted twice"),
    "no tap": (lambda s: s.hidden([5]), "no tap 5"),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_a_typed_error_that_changes_nothing(misuse: str) -> None:
    s, _ = session()
    act, said = MISUSE[misuse]
    s.observe(text(3))
    s.logits_after([9, 8])
    s.observe([9])
    with pytest.raises((SessionError, InvalidOption), match=said) as caught:
        act(s)
    assert caught.value.fix
    assert s.history == [*text(3), 9]
    close(s.next_logits(), fresh(s.history))
    close(s.logits_after([8, 7])[2], fresh([*s.history, 8, 7]))


def test_an_empty_history_has_no_logits() -> None:
    s, _ = session()
    for ask in (s.next_logits, lambda: s.logits_after([1]), lambda: s.hidden(["final"])):
        with pytest.raises(SessionError, match="empty"):
            ask()
    s.observe([3])
    close(s.next_logits(), fresh([3]))


def test_a_closed_session_says_so() -> None:
    s, _ = session()
    s.observe([1])
    moment = s.snapshot()
    s.close()
    acts = [s.next_logits, s.snapshot, s.reset, lambda: s.observe([1]), lambda: s.restore(moment)]
    for act in [*acts, lambda: s.hidden([1]), lambda: s.tree_logits(TREE)]:
        with pytest.raises(SessionError, match="closed"):
            act()


def test_the_context_can_be_used_to_its_last_token() -> None:
    s = toy_llm(context_length=32).session()
    s.observe([1] * 30)
    assert s.logits_after([2, 3]).shape == (3, 37)
    s.observe([2, 3])
    assert s.next_logits().isfinite().all()
    with pytest.raises(SessionError, match="context of 32"):
        s.observe([1])


def test_a_failed_pass_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    s, _ = session()
    s.observe(text(510))
    s.next_logits()
    calls = 0

    def fails(self: Decoder, rows: Rows, cache: KVCache, want: Want) -> Forward:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return Decoder.forward(self, rows, cache, want)

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "forward", fails)
        with pytest.raises(OutOfMemory, match="no memory on cpu") as caught:
            s.logits_after([1] * 9)
    assert isinstance(caught.value, PacelineError)
    close(s.logits_after([1, 2])[2], fresh([*text(510), 1, 2]))


def test_greedy_text_with_drafts_equals_generate_in_bfloat16() -> None:
    target = tiny_target(dtype=torch.bfloat16)
    llm = LLM(Loaded(target, toy_tokenizer(), (36,), {}, Path("toy")))
    if llm.guarantee != "bits":
        pytest.skip("this machine's bfloat16 products depend on their shape")
    plain, s, written = llm.session(), llm.session(), []
    plain.observe(text(20))
    s.observe(text(20))
    for i in range(60):
        row = plain.next_logits()
        drafts = [i % 37, 5, int(row.argmax())][i % 3 :]
        assert torch.equal(s.logits_after(drafts)[0], row)
        written.append(int(row.argmax()))
        plain.observe(written[-1:])
        s.observe(written[-1:])
    assert written == llm.generate(text(20), Sampling(max_new_tokens=60, ignore_eos=True)).token_ids
