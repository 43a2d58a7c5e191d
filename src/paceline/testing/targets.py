"""The checks that every target and its cache must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.cache.layout import NONE
from paceline.errors import CacheError
from paceline.protocols import Target
from paceline.sampling.parameters import Sampling
from paceline.testing.drafters import Oracle
from paceline.testing.probe import BUSHY, SHAPES, Probe, Text, depth_first
from paceline.testing.tiny import run
from paceline.types import Draft, DraftBudget, Rows, Tap, Want
from paceline.verify.tree import depths, pack, pack_prefix, paths_of


def check_target(make: Callable[[], Target], *, tolerance: float = 1e-6, taps: Sequence[Tap] = ()) -> None:
    """Check the contracts of `Target` and `KVCache`.

    All results are compared with plain feeding: one token per pass, each committed.

    Args:
        make: Function that makes the target. It needs a vocabulary of at least 8 tokens and a context length of at
            least 48; up to a context length of 1024, the end of the context is tested too.
        tolerance: Maximum absolute difference of logits and hidden states.
        taps: Hidden states that the target returns, which are checked too.

    Raises:
        AssertionError: The target or its cache breaks the contract. The message says how.
    """
    for clause in CLAUSES:
        probe = Probe(make(), tolerance, tuple(taps))
        try:
            clause(probe)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{clause.__doc__} It raised {error!r}") from error


def _drafts(probe: Probe) -> None:
    """The logits of a draft's row must equal plain feeding of its path."""
    for length in (1, 6, 11):
        text = probe.text(length)
        for shape in SHAPES:
            draft = text.draft(shape)
            kind = "a tree" if shape.branch > 1 else "a chain"
            text.expect(f"{kind} of {len(draft.tokens)} after {length} tokens", draft)
            if shape.branch > 1:
                text.expect("a tree numbered depth first", depth_first(draft))


def _wanted(probe: Probe) -> None:
    """A pass must return the wanted logits and taps, in float32 or float64."""
    text = probe.text(9)
    draft = text.draft(DraftBudget.chain(4))
    rows = max(4, len(draft.tokens) + 1)
    full = text.verify(draft)
    assert full.logits.dtype in (torch.float32, torch.float64), f"logits are {full.logits.dtype}, not float32"
    for want, count in (("all", rows), ("last", 1), ("none", 0)):
        out = text.verify(draft, Want(want, probe.taps))  # type: ignore[arg-type]
        shape = (1, count, probe.target.vocab_size)
        assert tuple(out.logits.shape) == shape, f"Want({want!r}): logits {tuple(out.logits.shape)}, not {shape}"
        probe.close(f"Want({want!r}) changes the logits", out.logits, full.logits[:, rows - count :])
        for tap in probe.taps:
            assert tap in out.taps, f"Want({want!r}): no tap {tap!r}"
            assert out.taps[tap].shape[:2] == (1, rows), f"tap {tap!r} has shape {tuple(out.taps[tap].shape)}"
            probe.close(f"Want({want!r}) changes tap {tap!r}", out.taps[tap], full.taps[tap])


def _chunks(probe: Probe) -> None:
    """Prefill chunks of any size must have the same effect as plain feeding."""
    text = probe.text(1)
    tokens = probe.tokens(20, seed=1)
    text.tokens = tokens
    for first, end in ((0, 7), (7, 8), (8, 10), (10, 19)):
        rows = pack_prefix(tokens[first:end], text.slot, first, probe.target.device)
        out = probe.forward(rows, probe.cache, Want(taps=probe.taps))
        probe.cache.commit(rows, [range(1, end - first)])
        for i in range(end - first):
            probe.compare("a prefill chunk", tokens[: first + i + 1], out, 0, i)
    text.expect("after prefill chunks")


def _ragged(probe: Probe) -> None:
    """Slots of different lengths and with different drafts must not affect each other in a pass."""
    texts = [probe.text(length, seed) for seed, length in enumerate((3, 14, 8))]
    for order in ([0, 1, 2], [2, 0], [1, 2, 0]):
        group = [texts[i] for i in order]
        drafts = [text.draft(SHAPES[i + 1]) for i, text in zip(order, group, strict=True)]
        rows = pack(
            [text.tokens[-1] for text in group],
            drafts,
            [text.slot for text in group],
            [text.length for text in group],
            probe.target.device,
        )
        out = probe.forward(rows, probe.cache, Want(taps=probe.taps))
        for line, (text, draft) in enumerate(zip(group, drafts, strict=True)):
            text.expect(f"line {line} of a batch of {len(group)}", draft, out, line)
        for text, draft in zip(group, drafts, strict=True):
            text.commit(draft, max(paths_of(draft).values()), rows)
            text.tokens.append(5)


def _traces(probe: Probe) -> None:
    """Rows that were fed but not committed must leave no trace."""
    text = probe.text(8)
    rows = pack_prefix(probe.tokens(6, seed=3), text.slot, text.length, probe.target.device)
    for shape in (*SHAPES, *SHAPES[::-1]):
        text.verify(text.draft(shape, seed=1))
        probe.forward(rows, probe.cache, Want("none"))
        text.expect("after uncommitted rows", text.draft(shape))
    text.add(*probe.tokens(3, seed=2))
    text.expect("continuing after uncommitted rows")


def _commits(probe: Probe) -> None:
    """Any path of a draft can be committed, and the text continues after it."""
    for shape in (DraftBudget.chain(3), BUSHY):
        for length in (4, 5):
            for node in range(shape.nodes + 1):
                text = probe.text(length, cache=probe.target.new_cache())
                draft = depth_first(text.draft(shape))
                path = paths_of(draft).get(node, [])
                text.verify(draft)
                text.commit(draft, path)
                text.tokens.append(3)
                text.expect(f"after commit of the path {path} of {draft.parents}")


def _passes(probe: Probe) -> None:
    """Only a slot's latest pass can be committed, only once, and not after the slot was released."""
    text = probe.text(6)
    text.verify(Draft())
    older = text.rows
    text.verify(text.draft(DraftBudget.chain(2)))
    newer = text.rows

    def refused(said: str, rows: Rows, slot: int) -> None:
        before = probe.cache.lengths[slot]
        try:
            probe.cache.commit(rows, [()])
        except CacheError:
            assert probe.cache.lengths[slot] == before, f"{said} changed the slot"
            return
        raise AssertionError(f"{said} was committed")

    refused("the older of two passes", older, text.slot)
    text.commit(Draft(), (), newer)
    refused("the same pass for the second time", newer, text.slot)
    refused("an older pass after a newer one", older, text.slot)
    text.tokens.append(3)
    text.expect("after refused commits")
    left = text.rows
    probe.cache.release(text.slot)
    owner = probe.text(1, seed=1)
    while owner.length != left.lengths[0]:
        owner.add(2)
    refused("a released slot's pass on the next owner", replace(left, slots=(owner.slot,)), owner.slot)


def _truncation(probe: Probe) -> None:
    """A slot can be truncated. Its number of tokens then equals its length."""
    text = probe.text(14)
    for seed, length in enumerate((13, 12, 7, 6, 2, 0)):
        text.verify(text.draft(BUSHY))
        before = text.length
        probe.cache.truncate(text.slot, length)
        kept = text.length
        assert kept == length or (kept < length < before), f"truncation of {before} tokens to {length} kept {kept}"
        text.tokens = [*text.tokens[:kept], 6 + seed % 2]
        text.expect(f"after truncation to {length}")
        text.add(*probe.tokens(length - kept, seed), 4)
        text.expect(f"continuing after truncation to {length}")
        probe.cache.truncate(text.slot, min(length, text.length))
        text.tokens = [*text.tokens[: text.length], 1]


def _forks(probe: Probe) -> None:
    """A fork starts with the committed tokens and is independent afterwards."""
    text = probe.text(9)
    text.verify(text.draft(BUSHY))
    fork = Text(probe, probe.cache, probe.cache.fork(text.slot), list(text.tokens))
    assert fork.slot != text.slot, "fork returned the same slot"
    assert fork.length == text.length, f"a fork of {text.length} tokens has {fork.length}"
    fork.expect("a fork")
    fork.add(2, 3)
    text.add(4)
    fork.expect("a fork that continued")
    text.expect("a text that was forked")
    probe.cache.release(text.slot)
    fork.add(5)
    fork.expect("a fork whose origin was released")


def _saves(probe: Probe) -> None:
    """A saved text can be loaded up to its length, even after its slot has changed."""
    text = probe.text(11)
    text.verify(text.draft(BUSHY))
    tokens, saved = list(text.tokens), probe.cache.save(text.slot)
    assert saved.length == text.length, f"{saved.length} of {text.length} tokens were saved"
    text.add(3, 4)
    probe.cache.release(text.slot)
    probe.text(14, seed=2)
    for cache in (probe.cache, probe.target.new_cache()):
        for length in (saved.length, saved.length - 1, 5, 1):
            slot = cache.acquire()
            kept, said = cache.load(slot, saved, length), saved.most(length, 0)
            assert kept == said <= length, f"most({length}) is {said}, but load returned {kept} tokens"
            assert cache.lengths[slot] == kept, f"load returned {kept} tokens, but the slot has {cache.lengths[slot]}"
            loaded = Text(probe, cache, slot, [*tokens[:kept], 5])
            loaded.expect(f"after {length} tokens were loaded")
            loaded.add(*probe.tokens(3, seed=length))
            loaded.expect(f"continuing after {length} tokens were loaded")
    assert not saved.holds(saved.length + 1, 0), "a saved text claims to hold more tokens than were saved"


def _lives(probe: Probe) -> None:
    """Slots can be acquired and released in any order without affecting each other, and a reused slot is empty."""
    texts = [probe.text(length, seed) for seed, length in enumerate((12, 5, 8))]
    assert len({text.slot for text in texts}) == 3, "a slot was acquired twice"
    for seed in range(3, 7):
        gone = texts.pop(0)
        gone.verify(gone.draft(BUSHY))
        probe.cache.release(gone.slot)
        probe.cache.release(gone.slot)
        for text in texts:
            text.expect("after another slot was released")
            text.add(seed)
        slots = [probe.cache.acquire(), probe.cache.acquire()]
        assert len({*slots, *(text.slot for text in texts)}) == 4, "a slot was acquired twice"
        held = [probe.cache.lengths[slot] for slot in slots]
        assert held == [0, 0], f"a new slot holds {max(held)} tokens"
        probe.cache.release(slots[0])
        texts.append(Text(probe, probe.cache, slots[1]))
        texts[-1].add(*probe.tokens(seed, seed))
        for text in texts:
            text.expect("after a released slot was reused")


def _caches(probe: Probe) -> None:
    """Two caches of one target are independent."""
    ours, theirs = probe.text(9), probe.text(6, seed=1, cache=probe.target.new_cache())
    for _ in range(2):
        ours.expect("with another cache in use")
        theirs.expect("with another cache in use")
        ours.add(3)


def _growing(probe: Probe) -> None:
    """A tree can grow over several passes (`Rows.starts`), after rows that are not committed."""
    text = probe.text(7)
    text.verify(Draft())
    text.commit(Draft(), ())
    budget = probe.cache.fit(text.slot, BUSHY)
    draft = probe.fill(budget)
    deep, first = depths(draft.parents)[1:], 0
    for depth in range(1, budget.depth + 1):
        level = [i for i, d in enumerate(deep) if d == depth]
        end = first + len(level)
        rows = Rows(
            tokens=torch.tensor([[draft.tokens[i] for i in level]], device=probe.target.device),
            positions=torch.tensor([[text.length - 1 + depth] * len(level)], device=probe.target.device),
            slots=(text.slot,),
            lengths=(text.length,),
            parents=(tuple(parent - 1 if parent else NONE for parent in draft.parents[:end]),),
            starts=(first,),
        )
        out = probe.forward(rows, probe.cache, Want(taps=probe.taps))
        for line, i in enumerate(level):
            tokens = [*text.tokens, *(draft.tokens[r - 1] for r in paths_of(draft)[i + 1])]
            probe.compare(f"level {depth} of a growing tree", tokens, out, 0, line)
        first = end


def _fits(probe: Probe) -> None:
    """`fit` must stay within the budget and allow some drafts, and every allowed draft must be verified exactly."""
    most = 0
    text = probe.text(1)
    for step in (1, 2, 3):
        for shape in (DraftBudget.chain(12), DraftBudget(14, 4, 3), DraftBudget(1, 1, 1), DraftBudget(3, 9, 1)):
            draft = text.draft(shape)
            most = max(most, len(draft.tokens))
            text.expect(f"all that fit allows after {step} tokens", draft)
        text.add(step)
    assert most > 0, "fit never allows a draft"


def _ends(probe: Probe) -> None:
    """The context can be used up to its last token."""
    room = probe.target.context_length
    assert room > 0, f"context_length is {room}"
    if room > 1024:
        return
    tokens = probe.tokens(room)
    text = Text(probe, probe.cache, probe.cache.acquire(), tokens[:1])
    while text.length < room - 4:
        chunk = tokens[text.length : min(text.length + 16, room - 4)]
        rows = pack_prefix(chunk, text.slot, text.length, probe.target.device)
        probe.forward(rows, probe.cache, Want("none"))
        probe.cache.commit(rows, [range(1, len(chunk))])
    text.tokens = tokens[: room - 3]
    text.expect("a draft up to the end of the context", text.draft(DraftBudget.chain(3)))
    text.add(*tokens[room - 3 :])
    text.expect("the last token of the context", Draft())


def _texts(probe: Probe) -> None:
    """Decoding with drafts, right or wrong, must write the same text as plain decoding."""
    target, prompt = probe.target, probe.tokens(10)
    for temperature in (0.0, 0.9):
        sampling = Sampling(max_new_tokens=24, temperature=temperature, seed=7)
        plain = run(target, prompt, sampling)[0]
        for accuracy in (0.0, 0.6, 1.0):
            for shape in (DraftBudget.chain(4), DraftBudget(10, 4, 3)):
                oracle = Oracle([*prompt, *plain], accuracy, target.vocab_size)
                text, _, stats = run(target, prompt, sampling, oracle, shape)
                assert text == plain, f"the text depends on the draft ({shape}, accuracy {accuracy:g})"
                assert accuracy < 1 or stats.accepted or not stats.drafted, "correct drafts are never accepted"


CLAUSES: tuple[Callable[[Probe], None], ...] = (
    _wanted,
    _drafts,
    _chunks,
    _traces,
    _commits,
    _truncation,
    _forks,
    _lives,
    _passes,
    _saves,
    _caches,
    _ragged,
    _growing,
    _fits,
    _ends,
    _texts,
)
