"""Recipe of a block drafter (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147): one pass guesses a whole block.

In training, blocks begin at many places of the answer and share one pass. A block sees the target's states before its
place, and attends to itself in both directions. Entry 0 is the real token at its place, and all other entries are
masks. Entry k guesses the token k places ahead, or k + 1 places ahead if `from_anchor` is set. The guess of an entry
cannot depend on the guesses before it. A Markov head corrects this: it adds logits that depend on the previous token,
which is the real one in training and the drafted one in decoding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoints.head_files import complete_token_maps
from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig, HeadFile
from paceline.models.rope import Rotary
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import MLP, DraftAttention, Factors, Norm, factors
from paceline.train.recipe import DraftPlaces, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch
from paceline.types import Tap


def default_taps(layers: int, count: int = 3) -> tuple[Tap, ...]:
    """Return taps spread from the output of the second layer to the third last layer, like published block drafters."""
    ids = [round(1 + i * (layers - 4) / max(1, count - 1)) for i in range(count)] if layers > 4 else range(layers)
    return tuple(dict.fromkeys(min(i + 1, layers - 1) for i in ids))


class _BlockAttention(DraftAttention):
    """Attention of each block over the context before it and over itself."""

    def forward(self, x: Tensor, rope: Factors, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from N blocks of S entries.

        Args:
            x: [B, N * S, H].
            rope: Rotary factors of the entries.
            context: Keys and values of the context, [B, kv_heads, T, D] each.
            mask: [B, 1, N, 1, T], 0 where a block sees the context, else -inf.

        Returns:
            [B, N * S, H].
        """
        b, blocks, t = len(x), mask.shape[2], mask.shape[-1]
        q = self.queries(x, rope).unflatten(2, (blocks, -1))  # [B, heads, N, S, D]
        k, v = (part.unflatten(2, (blocks, -1)) for part in self.keys(x, rope))  # [B, kv, N, S, D]
        group = self.heads // self.kv_heads
        before_k, before_v, k, v = (part.repeat_interleave(group, 1) for part in (*context, k, v))
        seen = (q.flatten(2, 3) @ before_k.mT).view(*q.shape[:-1], t) + mask
        weights = torch.cat([seen, q @ k.mT], -1).float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :t].flatten(2, 3) @ before_v).view(q.shape) + weights[..., t:] @ v
        out: Tensor = self.o_proj(mixed.permute(0, 2, 3, 1, 4).reshape(b, -1, self.heads * self.head_dim))
        return out


class _BlockLayer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.norms.eps), Norm(c.hidden, c.norms.eps)
        self.self_attn, self.mlp = _BlockAttention(c, c.hidden), MLP(c)


class _MarkovHead(nn.Module):
    """DSpark's correction of logits by the previous token. Untrained, it corrects nothing."""

    def __init__(self, vocab: int, rank: int, known: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, known, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class Network(nn.Module):
    """Network of a block drafter, with parameters named as in `models/heads.py`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        self.fc = nn.Linear(len(config.taps) * c.hidden, c.hidden, bias=False)
        self.hidden_norm, self.norm = Norm(c.hidden, c.norms.eps), Norm(c.hidden, c.norms.eps)
        self.layers = nn.ModuleList(_BlockLayer(c) for _ in range(c.layers))
        if config.markov:
            self.markov_head = _MarkovHead(c.vocab_size, config.markov, config.draft_vocab or c.vocab_size)
        self._rotary = Rotary(c.rope, c.head_dim, torch.float32, torch.device("cpu"))

    def forward(self, batch: DocumentBatch, pending: Tensor, x: Tensor) -> Tensor:
        """Run the network over blocks.

        Args:
            batch: The documents.
            pending: Place at which each block begins, [B, N].
            x: Embedded blocks, [B, N, S, H].

        Returns:
            Normed states [B, N, S, H].
        """
        size = x.shape[2]
        taps = torch.cat([batch.states[tap].float() for tap in self.config.taps], -1)
        context = self.hidden_norm(self.fc(taps))
        places = torch.arange(context.shape[1], device=x.device)
        context_rope = factors(self._rotary, places[None].expand(len(x), -1))
        block_rope = factors(self._rotary, (pending[..., None] + torch.arange(size, device=x.device)).flatten(1))
        mask = torch.zeros(*pending.shape, len(places), device=x.device)
        mask = mask.masked_fill(places >= pending[..., None], -torch.inf)[:, None, :, None]
        x = x.flatten(1, 2)
        for layer in self.layers:
            attention: _BlockAttention = layer.self_attn  # type: ignore[assignment]
            seen = attention.keys(context, context_rope)
            x = x + attention(layer.input_layernorm(x), block_rope, seen, mask)  # type: ignore[operator]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        y: Tensor = self.norm(x).unflatten(1, (-1, size))
        return y


class BlockRecipe(Recipe):
    """Recipe of a block drafter, which uses the target's output head, or some of its rows."""

    config: BlockConfig
    module: Network

    def __init__(self, config: BlockConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """Build the network. `vocabulary` [K] holds the token ids to draft from, ascending."""
        super().__init__(config, Network(config), target, vocabulary, config.depth)
        self.start_at_unit_logits(self.module.norm)

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """See `Recipe.begin_from`. The Markov head begins at 0 for tokens that the old vocabulary lacks."""
        if self.config.markov:
            head = self.by_token(head, "markov_head.markov_w2.weight", self.module.markov_head.markov_w2.weight)
        super().begin_from(head)

    def places(self, batch: DocumentBatch) -> DraftPlaces:
        """Return the places where drafts begin. Most are skipped, since overlapping blocks teach almost the same."""
        places, size = super().places(batch), self.config.size
        if not self.module.training:
            return places
        return places.every(size, int(torch.randint(min(size, places.pending.shape[1]), ())))

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = self.module(batch, places.pending, self._embedded(batch, places.pending))
        rows, first = tally.rows(self.teacher.rows), self.config.size - self.config.depth
        for step, real in enumerate(places.real):
            logits = F.linear(states[:, :, first + step][real], rows)
            if self.config.markov:
                before = gather(batch.tokens, places.pending + step)[real]
                head = self.module.markov_head
                logits = logits + F.linear(head.markov_w1(before), tally.rows(head.markov_w2.weight))
            tally.add(logits)

    def tensors(self) -> dict[str, Tensor]:
        if not self.config.draft_vocab:
            return super().tensors()
        head = self.teacher.rows.to("cpu", torch.bfloat16)
        return complete_token_maps(self.config, super().tensors() | {"d2t": self.teacher.d2t, "lm_head.weight": head})

    def _embedded(self, batch: DocumentBatch, pending: Tensor) -> Tensor:
        """Return the embedded blocks: the pending token, then masks."""
        tokens = batch.tokens.gather(1, pending)[..., None]
        masks = torch.full((*pending.shape, self.config.size - 1), self.config.mask_token, device=tokens.device)
        return self.target.embed(torch.cat([tokens, masks], -1)).float().clone()
