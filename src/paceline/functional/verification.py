"""Verification and commit of a whole batch: the rules of `verify/` for plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.functional.candidates import CandidateTree, expect, padded, require, temperatures, widen
from paceline.types import Verdict
from paceline.verify.rejection import rejection_walk
from paceline.verify.rules import walk


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of a round for each request.

    Attributes:
        tokens: The accepted candidates, followed by the token that the target adds (correction or bonus), int64 [B, D +
            1], padded with -1. The last token is the next pending token.
        counts: Number of tokens of each request, int64 [B].
        path: The rows that stay in the cache in addition to row 0, int64 [B, D], padded with -1. There is one row fewer
            than there are tokens.
        broken: True if the target's logits at a visited row have no finite maximum, bool [B]. The round ends above this
            row. Tokens that were accepted before it are valid. If there are none, the request does not change.
    """

    tokens: Tensor
    counts: Tensor
    path: Tensor
    broken: Tensor

    def cut(self, limit: Tensor) -> Accepted:
        """Keep at most `limit` [B] tokens of each request, to apply a stop condition. With 0 tokens, a request does not
        change."""
        expect("limit", limit, None, *self.counts.shape)
        counts = self.counts.minimum(limit).clamp(min=0)
        column = torch.arange(self.tokens.shape[1], device=counts.device)
        return Accepted(
            tokens=self.tokens.where(column < counts[:, None], NONE),
            counts=counts,
            path=self.path.where(column[1:] < counts[:, None], NONE),
            broken=self.broken,
        )


def verify_greedy(tree: CandidateTree, logits: Tensor) -> Accepted:
    """Accept the target's most likely tokens, and the lowest id in a tie. The text equals plain greedy decoding.

    Args:
        tree: Candidates.
        logits: The target's logits at every row, [B, T, V].

    Raises:
        InvalidOption: If a shape or token is not valid.
    """
    return verify_sampling(tree, logits, temperature=0.0)


def verify_sampling(
    tree: CandidateTree,
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Draw the target's token at each visited row, and continue if a candidate has this token (the rule `match`).

    The token is argmax(logits / temperature + noise). So the text has the target's distribution, whatever was drafted.

    Args:
        tree: Candidates.
        logits: The target's logits at every row, [B, T, V]. To exclude tokens (top-k, top-p), set them to -inf.
        temperature: A number or a tensor [B]. 0 means greedy.
        noise: Standard Gumbel noise [B, D + 1, V]. `noise[:, d]` belongs to the token d + 1 places after the pending
            token. If the noise depends only on the place in the text (`paceline.sampling.noise`), the text equals plain
            decoding with the same noise.
        generator: Source of the noise if `noise` is None.

    Raises:
        InvalidOption: If a shape, token or temperature is not valid, or both noise and generator are given.
    """
    logits, heat = _checked(tree, logits, temperature)
    _check_noise(noise, (len(logits), tree.max_depth + 1, logits.shape[2]), generator)
    best = _best(logits)

    def choose(b: int, row: int, path: Sequence[int]) -> int:
        if heat[b] == 0.0 or best[b][row] == NONE:
            return best[b][row]
        scores = logits[b, row] / heat[b]
        if noise is not None:
            return int((scores + noise[b, len(path)].to(scores)).argmax())
        waits = torch.empty_like(scores).exponential_(generator=generator)
        return int((scores - waits.clamp_min_(torch.finfo(waits.dtype).tiny).log_()).argmax())

    return _accepted(tree, [walk(draft, partial(choose, b)) for b, draft in enumerate(tree.drafts)])


def verify_rejection(
    tree: CandidateTree,
    logits: Tensor,
    q: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Accept a candidate x with probability min(1, p(x) / q(x)). After a rejection, try its next sibling against the
    residual.

    See `verify.rejection.rejection_walk`. The text has exactly the target's distribution. With most drafters, it
    accepts more tokens than `verify_sampling`.

    Args:
        tree: Candidates. Siblings must be in the order of their draws from q without replacement, as `sample` returns
            them.
        logits: The target's logits at every row, [B, T, V].
        q: The distribution that each row's children were drawn from, [B, T, V]. A child with q = 0, or any child of a
            row where q is not finite, counts as chosen instead of drawn: it is accepted with probability p(x).
        temperature: Temperature of the target, a number or a tensor [B]. 0 means greedy.
        uniforms: Numbers in [0, 1), [B, D + 1, S + 1] with S = tree.max_branch: one for each sibling, and a last one
            for the token that the target adds. They must be independent of the draws of the candidates.
        generator: Source of the numbers if `uniforms` is None.

    Raises:
        InvalidOption: If a shape, token or temperature is not valid, or both uniforms and generator are given.
    """
    logits, heat = _checked(tree, logits, temperature)
    expect("q", q, None, *logits.shape)
    need = (len(logits), tree.max_depth + 1, tree.max_branch + 1)
    _check_noise(uniforms, need, generator)
    if uniforms is None:
        device = generator.device if generator else None
        uniforms = torch.rand(need, dtype=torch.float64, generator=generator, device=device)
    best, q = _best(logits), widen(q)
    mass = q.sum(-1)
    drawn = (mass.isfinite() & (mass > 0)).tolist()
    verdicts = []
    for b, (draft, numbers) in enumerate(zip(tree.drafts, uniforms.tolist(), strict=True)):
        if not heat[b]:
            verdicts.append(walk(draft, lambda row, path, after=best[b]: after[row]))  # type: ignore[misc]
            continue
        known = {row: (q[b, row] / mass[b, row]).cpu() for row in {*draft.parents} if drawn[b][row]}
        draws = _GivenDraws(logits[b], heat[b], numbers)
        verdicts.append(rejection_walk(replace(draft, q=known), draws.probabilities, draws))
    return _accepted(tree, verdicts)


def append(tokens: Tensor, lengths: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Append the accepted tokens to the texts.

    Args:
        tokens: int64 [B, L]. The text of request b is `tokens[b, : lengths[b] + 1]`, ending with the pending token. All
            other columns are overwritten.
        lengths: int64 [B].
        accepted: Result of the round.

    Returns:
        The new tokens [B, L'], padded with -1, and the new lengths [B]. L' is greater than L if the longest text needs
        more room. To find that out, the function waits for the device.

    Raises:
        InvalidOption: If a shape is not valid.
    """
    expect("lengths", lengths, "int64", *accepted.counts.shape)
    expect("the token cache", tokens, "int64", len(lengths), "L")
    after = lengths + accepted.counts
    width = int(after.max()) + 1 if len(after) else 0
    text = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])), value=NONE)
    column = torch.arange(text.shape[1], device=text.device)
    new = column - lengths[:, None] - 1
    written = accepted.tokens.gather(1, new.clamp(0, accepted.tokens.shape[1] - 1))
    text = torch.where((new >= 0) & (new < accepted.counts[:, None]), written, text)
    return text.where(column <= after[:, None], NONE), after


def gather_kv_(cache: Tensor, lengths: Tensor, accepted: Accepted) -> Tensor:
    """Move the keys or values of the accepted rows directly after the committed text, in place.

    Only the columns of the longest path are copied. Columns after the new length keep their contents until the next
    round overwrites them.

    Args:
        cache: Keys or values of one layer, [B, heads, L, D]. Row r of request b is in column `lengths[b] + r`.
        lengths: Lengths before `append`, int64 [B].
        accepted: Result of the round.

    Returns:
        The cache.

    Raises:
        InvalidOption: If a shape is not valid.
    """
    expect("lengths", lengths, "int64", *accepted.counts.shape)
    expect("keys or values", cache, None, len(lengths), "heads", "L", "D")
    kept = accepted.path > 0
    place = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    shape = (-1, cache.shape[1], -1, cache.shape[3])
    # A padding step copies row 0 onto itself.
    old, new = (
        (lengths[:, None] + rows.where(kept, 0))[:, None, :, None].expand(shape)
        for rows in (accepted.path, place.expand_as(kept))
    )
    return cache.scatter_(2, new, cache.gather(2, old))


class _GivenDraws:
    """The target's distributions in one request's round, and the random draws (`verify.rejection.RandomDraws`)."""

    def __init__(self, logits: Tensor, temperature: float, uniforms: list[list[float]]) -> None:
        self._logits, self._temperature, self._uniforms = logits, temperature, uniforms
        self._depth = self._tried = 0

    def probabilities(self, row: int, path: Sequence[int]) -> Tensor:
        """Return p [V]. It is NaN for a row without a finite maximum. The walk ends at such a row, and accepts nothing
        there."""
        self._depth, self._tried = len(path), 0
        return (self._logits[row] / self._temperature).softmax(-1).cpu()

    def accept(self, probability: float) -> bool:
        self._tried += 1
        return self._uniforms[self._depth][self._tried - 1] < probability

    def token(self, p: Tensor) -> int:
        return NONE if bool(p.isnan().any()) else draw(p, self._uniforms[self._depth][-1])


def draw(p: Tensor, uniform: float) -> int:
    """Draw a token from p [V], which need not be normalised, by inverting its cumulative sum."""
    edges = p.cumsum(-1)
    token = int(torch.searchsorted(edges, uniform * edges[-1], right=True))
    # If `uniform` is almost 1, the product may round to the full sum.
    return token if token < len(p) else int(p.argmax())


def _best(logits: Tensor) -> list[list[int]]:
    """Return the most likely token after each row, [B][T]. It is `NONE`, which ends a walk, if the row has no finite
    maximum."""
    best = logits.max(-1)
    tokens: list[list[int]] = best.indices.where(best.values.isfinite(), NONE).tolist()
    return tokens


def _accepted(tree: CandidateTree, verdicts: Sequence[Verdict]) -> Accepted:
    """Pack the results of walks. Leave out the final `NONE` of a walk that ended at a broken row."""
    device, depth = tree.tokens.device, tree.max_depth
    broken = [verdict.tokens[-1] == NONE for verdict in verdicts]
    counts = [len(verdict.tokens) - end for verdict, end in zip(verdicts, broken, strict=True)]
    return Accepted(
        tokens=padded([verdict.tokens for verdict in verdicts], depth + 1, device),
        counts=torch.tensor(counts, device=device),
        path=padded([v.path[: max(0, n - 1)] for v, n in zip(verdicts, counts, strict=True)], depth, device),
        broken=torch.tensor(broken, device=device),
    )


def _checked(tree: CandidateTree, logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, list[float]]:
    batch, nodes = tree.tokens.shape
    expect("the target's logits, of the pending token and then of each node", logits, "float", batch, nodes + 1, "V")
    largest = max((token for draft in tree.drafts for token in draft.tokens), default=0)
    require(
        largest < logits.shape[2],
        f"the tree contains token {largest}, but the target has {logits.shape[2]} tokens",
        "Draft from the target's vocabulary",
    )
    return widen(logits), temperatures(temperature, batch)


def _check_noise(given: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
    if given is not None:
        require(generator is None, "noise or uniforms were given together with a generator", "Give only one of them")
        expect("the given noise", given, None, *shape)
