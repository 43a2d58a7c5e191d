"""Sessions, which run a target for your own decoding loop: feed tokens, score drafts, roll back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from paceline.errors import SessionError, memory_named
from paceline.protocols import Closable, KVCache, Target
from paceline.types import Draft, DraftBudget, Forward, Prompt, Rows, Tap, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, check, chunk_end, depths, pack, pack_prefix, paths_of
from paceline.vision.prompt import ImagePrompt

_Results = tuple[Tensor, dict[Tap, Tensor]]
"""Logits and taps of several rows, or of a single row."""


@dataclass(frozen=True, slots=True)
class _ScoredRows:
    """The rows of a draft, with their logits and taps.

    Attributes:
        draft: The draft. Its rows follow row 0.
        start: Position of row 0 in the history.
        logits: [T, V].
        taps: Tap -> [T, H].
    """

    draft: Draft
    start: int
    logits: Tensor
    taps: dict[Tap, Tensor]

    def child(self, row: int, token: int) -> int | None:
        """Return the child of `row` with this token, or None if it was not scored."""
        edges = zip(self.draft.parents, self.draft.tokens, strict=True)
        return next((node for node, edge in enumerate(edges, 1) if edge == (row, token)), None)

    def find(self, row: int, draft: Draft) -> list[int] | None:
        """Return `row` and the rows of another draft that follows it, or None if not all of them were scored."""
        rows = [row]
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            child = self.child(rows[parent], token)
            if child is None:
                return None
            rows.append(child)
        return rows


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a session, for `Session.restore`. It contains tokens and scored rows, but no keys and values."""

    history: tuple[int, ...]
    _owner: object = field(repr=False)
    _scored: _ScoredRows | None = field(repr=False)
    _path: tuple[int, ...] = field(repr=False)


class Session(Closable):
    """One text and a target that continues it. Only `observe` appends to the text. Create a session with
    `LLM.session()`.

    The last token of the history is the pending token, which is row 0 of the next pass. Scored rows are kept until the
    history diverges from them. If a token was drafted and is then observed, its logits therefore need no further pass,
    and its keys and values stay in the cache.

    Each session has its own cache. To free its memory, close the session, leave its `with` block, or delete the object.
    A call that raises a `SessionError` changes nothing. Do not use a session from several threads at the same time.
    """

    _cache: KVCache | None = None

    def __init__(
        self,
        target: Target,
        eos_token_ids: tuple[int, ...],
        encode: Callable[..., list[int]],
        decode: Callable[[Sequence[int]], str],
        adapter: int = 0,
    ) -> None:
        """Create a session with an empty history.

        Args:
            target: The target.
            eos_token_ids: Tokens that end a reply.
            encode: Converts a prompt to token ids, like `LLM.encode`.
            decode: Converts token ids to text.
            adapter: See `KVCache.acquire`.
        """
        self._target, self.eos_token_ids, self._encode, self._decode = target, eos_token_ids, encode, decode
        self._adapter, cache = adapter, self._target.new_cache()
        self._slot = cache.acquire(0, adapter)
        self._cache = cache
        self._text: list[int] = []
        self._prompt = 0
        """Length of the history when it was first fed. The rotary factors of some models depend on it."""
        self._scored: _ScoredRows | None = None
        self._path: list[int] = []
        """The scored rows, after row 0, that are part of the history."""
        self._fed: Rows | None = None
        """The pass that scored the rows. None once they are committed."""
        self._asked = Draft()
        """The draft whose logits were requested most recently. Empty after the history has changed."""
        self._taps: tuple[Tap, ...] = ()
        self._key = object()

    # Properties and conversion

    @property
    def history(self) -> list[int]:
        """A copy of all tokens observed so far."""
        return list(self._text)

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def context_length(self) -> int:
        """Maximum length of the history, in tokens."""
        return self._target.context_length

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Convert a prompt to token ids, like `LLM.encode`. Raise `InvalidPrompt` if it is empty or malformed."""
        return self._encode(prompt, raw=raw)

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to text."""
        return self._decode(list(ids))

    # Changes of the history

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens to the history. No pass runs yet: tokens that were not scored are fed when logits are needed.

        Raises:
            SessionError: If an id is out of range, or the history would exceed the context length.
        """
        self._kv()
        ids = _ids(ids)
        self._check_ids(ids)
        self._check_room(len(ids))
        for token in ids:
            row = self._row()
            child = self._scored.child(row, token) if self._scored and row is not None else None
            self._text.append(token)
            if child is not None:
                self._path.append(child)
        self._asked = Draft()

    def rollback_to(self, length: int) -> None:
        """Drop all tokens after the first `length`. Raise `SessionError` if the history is shorter."""
        self._kv()
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(self._text):
            raise SessionError(
                f"cannot roll back to {length!r} of {len(self._text)} tokens",
                f"Use a length from 0 to {len(self._text)}",
            )
        del self._text[length:]
        self._prompt = self._prompt if self._text else 0
        if self._scored and length <= self._scored.start:
            self._forget()
        elif self._scored:
            del self._path[length - 1 - self._scored.start :]
        self._trim(length)
        self._asked = Draft()

    def reset(self) -> None:
        """Clear the history."""
        self.rollback_to(0)

    def snapshot(self) -> Snapshot:
        """Return the current state, for `restore`. This copies the token ids of the history."""
        self._kv()
        return Snapshot(tuple(self._text), self._key, self._scored, tuple(self._path))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to the history and the scored logits of a snapshot.

        The cache keeps the common prefix of both histories. All later tokens are run through the model again when
        logits are needed.

        Raises:
            SessionError: If the snapshot belongs to another session.
        """
        self._kv()
        if not isinstance(snapshot, Snapshot) or snapshot._owner is not self._key:
            raise SessionError(
                "this snapshot belongs to another session", "Restore it there, or observe its `history` here"
            )
        common = takewhile(lambda pair: pair[0] == pair[1], zip(self._text, snapshot.history, strict=False))
        self.rollback_to(len([*common]))
        self.observe(snapshot.history[len(self._text) :])
        if snapshot._scored is not None and snapshot._scored is not self._scored:
            self._commit()
            self._scored, self._path = snapshot._scored, list(snapshot._path)

    # Output of the model

    def next_logits(self) -> Tensor:
        """Return the logits after the last token of the history, float32 [V] (float64 for a float64 model).

        This runs no pass if the last token has already been scored.

        Raises:
            SessionError: If the history is empty.
        """
        return self.logits_after(())[0]

    def logits_after(self, drafts: Sequence[int]) -> Tensor:
        """Return the logits after the history and after each draft token, computed in one pass.

        The history does not change. If these tokens are observed later, the pass is reused.

        Args:
            drafts: k draft tokens.

        Returns:
            Logits [k + 1, V]. Row i follows the history and the first i draft tokens.

        Raises:
            SessionError: If the history is empty, an id is out of range, or the tokens exceed the context length.
        """
        return self.tree_logits(Draft.chain(_ids(drafts)))

    def tree_logits(self, tree: Draft) -> Tensor:
        """Return the logits after the history and after each node of a draft tree, computed in one pass.

        The history does not change. If a path of the tree is observed later, the pass is reused. If the tree is too
        large for the cache to verify in one pass (`KVCache.fit`), it takes several passes, and its keys and values are
        not kept.

        Args:
            tree: A draft of N nodes.

        Returns:
            Logits [N + 1, V]. Row 0 follows the history. Row i + 1 follows node i and its ancestors.

        Raises:
            SessionError: If the history is empty, an id is out of range, or the tree exceeds the context length.
            InvalidOption: If the tree is malformed.
        """
        if not isinstance(tree, Draft):
            raise SessionError(
                f"tree must be a Draft, got {type(tree).__name__}", "Use paceline.Draft(tokens, parents)"
            )
        scored, rows = self._score(tree, ())
        return scored.logits[rows]

    def hidden(self, taps: Sequence[Tap]) -> dict[Tap, Tensor]:
        """Return the hidden states of the rows whose logits were requested most recently.

        If the history has changed since, or no logits have been requested yet, this is only the row of the last token.
        The first request for a tap costs an additional pass. Later passes always compute the tap.

        Args:
            taps: The taps to return. Tap i is the residual stream entering layer i. "final" is the normed output.

        Returns:
            Tap -> [R, H]. R is 1 after `next_logits`, k + 1 after `logits_after`, and N + 1 after `tree_logits`.

        Raises:
            SessionError: If the model lacks a tap, or the history is empty.
        """
        if isinstance(taps, str) or not isinstance(taps, Sequence):
            raise SessionError(f"taps must be a list, got {taps!r}", 'Use numbers of layers, or "final"')
        scored, rows = self._score(self._asked, tuple(taps))
        return {tap: scored.taps[tap][rows] for tap in taps}

    # End

    def close(self) -> None:
        """Release the cache. Closing twice does nothing."""
        if self._cache is not None:
            self._cache.release(self._slot)
        self._cache = None
        self._forget()

    def __repr__(self) -> str:
        return f"Session({len(self._text)} tokens{', closed' if self._cache is None else ''})"

    # Passes

    def _score(self, draft: Draft, taps: tuple[Tap, ...]) -> tuple[_ScoredRows, list[int]]:
        """Return scored rows, and the indices of the rows of the pending token and of the draft.

        A pass runs only if rows are missing.
        """
        self._kv()
        check(draft)
        self._check_ids(draft.tokens)
        if not self._text:
            raise SessionError("the history is empty", "Observe at least one token first")
        self._check_room(max(depths(draft.parents)))
        row = self._row()
        rows = self._scored.find(row, draft) if self._scored and row is not None else None
        if self._scored is None or rows is None or not self._scored.taps.keys() >= set(taps):
            self._scored, self._path = self._pass(draft, tuple(dict.fromkeys((*self._taps, *taps))))
            last = len(self._path)
            rows = list(range(last, last + len(draft.tokens) + 1))
            if missing := [tap for tap in taps if tap not in self._scored.taps]:
                raise SessionError(f"this model has no tap {missing[0]!r}", 'Use the number of a layer, or "final"')
            self._taps = tuple(self._scored.taps)
        self._asked = draft
        return self._scored, rows

    def _pass(self, draft: Draft, taps: tuple[Tap, ...]) -> tuple[_ScoredRows, list[int]]:
        """Run a pass, or several if the draft is too large for one. Return the scored rows, and the indices of the rows
        after row 0 that are already part of the history."""
        self._commit()
        self._catch_up()
        start = self._kv().lengths[self._slot]
        last = len(self._text) - 1 - start
        whole = _after(self._text[start + 1 :], draft)
        if not self._fits(whole):
            self._feed_prefix(len(self._text) - 1)
            return _ScoredRows(draft, start + last, *self._path_by_path(draft, taps)), []
        self._fed, (logits, states) = self._feed(self._text[start], whole, taps)
        return _ScoredRows(whole, start, logits, states), [*range(1, last + 1)]

    def _path_by_path(self, draft: Draft, taps: tuple[Tap, ...]) -> _Results:
        """Score each path of the draft as a separate chain, and roll the cache back after each chain."""
        results: dict[int, _Results] = {}
        for path in (path for row, path in paths_of(draft).items() if row not in draft.parents):
            try:
                results |= zip((0, *path), self._chain([draft.tokens[row - 1] for row in path], taps), strict=True)
            finally:
                self._trim(len(self._text) - 1)
                self._feed_prefix(len(self._text) - 1)
        logits, states = zip(*(results[row] for row in sorted(results)), strict=True)
        return torch.stack(logits), {tap: torch.stack([x[tap] for x in states]) for tap in states[0]}

    def _chain(self, drafts: list[int], taps: tuple[Tap, ...]) -> list[_Results]:
        """Feed and commit the pending token and a chain of drafts, in pieces that fit into a pass. Return the results
        of each row."""
        tokens, cache = [self._text[-1], *drafts], self._kv()
        results: list[_Results] = []
        while left := len(tokens) - len(results):
            nodes = cache.fit(self._slot, DraftBudget.chain(min(left, PREFILL_ROWS) - 1)).nodes
            first, *rest = tokens[len(results) :][: nodes + 1]
            rows, (logits, states) = self._feed(first, Draft.chain(rest), taps)
            cache.commit(rows, [range(1, nodes + 1)])
            results += [(row, {tap: x[i] for tap, x in states.items()}) for i, row in enumerate(logits)]
        return results

    def _feed(self, last: int, draft: Draft, taps: tuple[Tap, ...]) -> tuple[Rows, _Results]:
        """Run one pass over a token and a draft that follow the cached text. Return its rows, and its logits [T, V] and
        taps [T, H]."""
        length, count = self._kv().lengths[self._slot], len(draft.tokens) + 1
        rows = pack([last], [draft], [self._slot], [length], self._target.device)
        out = self._forward(rows, Want(taps=taps))
        return rows, (out.logits[0, :count], {tap: x[0, :count] for tap, x in out.taps.items()})

    def _catch_up(self) -> None:
        """Feed the uncached tokens of the history. If only a few are uncached, leave them to the next pass, where they
        cost nothing, because every pass has at least `MIN_ROWS` rows. The prompt's tokens are always fed here, as
        prompt chunks.
        """
        cache, before = self._kv(), len(self._text) - 1
        self._trim(before)
        if not cache.lengths[self._slot]:
            self._prompt = self._prompt or len(self._text)
            cache.release(self._slot)
            self._slot = cache.acquire(self._prompt, self._adapter)
        self._feed_prefix(min(self._prompt - 1, before))
        if before - cache.lengths[self._slot] >= MIN_ROWS:
            self._feed_prefix(before)

    def _feed_prefix(self, end: int) -> None:
        """Feed the history's uncached tokens before `end`."""
        cache = self._kv()
        while (done := cache.lengths[self._slot]) < end:
            chunk = self._text[done : min(chunk_end(done), end)]
            rows = pack_prefix(chunk, self._slot, done, self._target.device)
            self._forward(rows, Want("none"))
            cache.commit(rows, [range(1, len(chunk))])

    def _commit(self) -> None:
        """Commit the scored rows that have become part of the history, except the pending token's row. Forget the other
        rows."""
        scored, path, fed = self._scored, self._path, self._fed
        self._forget()
        if scored and fed:
            keep = min(len(path) + 1, len(self._text) - 1 - scored.start)
            if keep > 0:
                self._kv().commit(fed, [path[: keep - 1]])

    def _trim(self, length: int) -> None:
        """Truncate the cache to at most the first `length` tokens."""
        if self._kv().lengths[self._slot] > length:
            self._kv().truncate(self._slot, length)

    def _forget(self) -> None:
        self._scored, self._path, self._fed = None, [], None

    def _row(self) -> int | None:
        """Return the row of the pending token, or None if it was not scored."""
        if self._scored and len(self._text) - 1 == self._scored.start + len(self._path):
            return self._path[-1] if self._path else 0
        return None

    def _fits(self, draft: Draft) -> bool:
        """Return True if one pass can verify the draft with the same results as plain decoding (`KVCache.fit`)."""
        nodes, depth = len(draft.tokens), max(depths(draft.parents))
        if nodes >= PREFILL_ROWS:
            return False
        branch = 1 if depth == nodes else max(draft.parents.count(row) for row in set(draft.parents))
        return self._kv().fit(self._slot, DraftBudget(nodes, depth, branch)).nodes >= nodes

    def _forward(self, rows: Rows, want: Want) -> Forward:
        cause = f"no memory on {self._target.device} for a pass of {rows.tokens.numel()} rows"
        with memory_named(cause, "Use a shorter history, a smaller draft or a smaller dtype"):
            return self._target.forward(rows, self._kv(), want)

    # Checks

    def _kv(self) -> KVCache:
        if self._cache is None:
            raise SessionError("this session is closed", "Open another with `llm.session()`")
        return self._cache

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise SessionError(f"{token!r} is not a token id", f"Use whole numbers from 0 to {self.vocab_size - 1}")

    def _check_room(self, more: int) -> None:
        if len(self._text) + more > self.context_length:
            raise SessionError(
                f"{more} tokens after {len(self._text)} exceed the model's context of {self.context_length} tokens",
                "Draft or observe fewer tokens, or roll back",
            )


def _after(tokens: Sequence[int], draft: Draft) -> Draft:
    """Return the draft that consists of a chain of tokens, continued by `draft`."""
    first = len(tokens)
    return Draft((*tokens, *draft.tokens), (*range(first), *(first + parent for parent in draft.parents)))


def _ids(ids: Sequence[int]) -> list[int]:
    """Return token ids as a list. They may be a sequence or a tensor [T]. Raise `SessionError` for other types."""
    if isinstance(ids, Tensor) and ids.dim() == 1:
        return ids.tolist()
    if isinstance(ids, ImagePrompt):
        raise SessionError("a session does not support images", "Use generate, stream or batch")
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise SessionError(
            f"token ids must be a list, got {type(ids).__name__}", "Use [id, ...], even for a single token"
        )
    return list(ids)
