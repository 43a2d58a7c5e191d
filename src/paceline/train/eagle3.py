"""EAGLE-3's recipe (arXiv 2503.01840): the head is unrolled on its own outputs ("training-time test").

Row t of the head combines the target's states at t with the embedding of token t + 1, has rotary position t, and
guesses token t + 2. Step 0 sees only the target's states. Step s continues the draft of step s - 1: it sees the true
rows up to the beginning of the draft, then the draft's own rows, one per step, exactly as in decoding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoints.head_files import complete_token_maps
from paceline.models.config import ModelConfig
from paceline.models.heads import EagleConfig, HeadFile
from paceline.models.rope import Rotary
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import MLP, DraftAttention, Factors, Norm, factors
from paceline.train.recipe import DraftPlaces, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch
from paceline.types import Tap


def default_taps(layers: int) -> tuple[Tap, ...]:
    """Return an early, a middle and a late layer, like all published heads."""
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


class _UnrolledAttention(DraftAttention):
    """Attention of draft rows over the true rows of their document, then over the draft's own rows."""

    def forward(
        self, x: Tensor, rope: Factors, true: tuple[Tensor, Tensor], mask: Tensor, drafted: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend from one row for each of P drafts.

        Args:
            x: [B, P, 2H].
            rope: Rotary factors of the rows.
            true: Keys and values of the document, [B, kv_heads, T, D] each.
            mask: [B, 1, 1, P, T], 0 where draft p sees the document's row t, else -inf.
            drafted: Keys and values of the drafts' previous rows, [B, kv_heads, P, D] each.

        Returns:
            [B, P, H].
        """
        b, p, _ = x.shape
        q = self.queries(x, rope).unflatten(1, (self.kv_heads, -1))  # [B, kv, group, P, D]
        t = true[0].shape[2]
        scores = (q.flatten(2, 3) @ true[0].transpose(-1, -2)).view(*q.shape[:-1], t) + mask
        if drafted:
            scores = torch.cat([scores, torch.stack([(q * k[:, :, None]).sum(-1) for k, _ in drafted], -1)], -1)
        weights = scores.float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :t].flatten(2, 3) @ true[1]).view(q.shape)
        for i, (_, v) in enumerate(drafted):
            mixed = mixed + weights[..., t + i, None] * v[:, :, None]
        out: Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(b, p, -1))
        return out


class _DraftLayer(nn.Module):
    """A Llama layer. The input of its attention is [normed embedding | normed hidden state]."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = Norm(c.hidden, c.norms.eps), Norm(c.hidden, c.norms.eps)
        self.self_attn = _UnrolledAttention(c, 2 * c.hidden)
        self.post_attention_layernorm = Norm(c.hidden, c.norms.eps)
        self.mlp = MLP(c)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)


class Head(nn.Module):
    """Network of an EAGLE-3 head, with parameters named as in `models/heads.py`."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        normed = config.taps if config.fc_norm else ()
        self.fc_norm = nn.ModuleList(Norm(config.target_hidden, c.norms.eps) for _ in normed)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, c.hidden, bias=False)
        self.layers = nn.ModuleList([_DraftLayer(c)])
        self.norm = Norm(c.hidden, c.norms.eps)
        self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        self._rotary = Rotary(c.rope, c.head_dim, torch.float32, torch.device("cpu"))

    def fuse(self, batch: DocumentBatch) -> Tensor:
        """Return the fused taps [B, T, H], the head's input at every row."""
        parts = [batch.states[tap].float() for tap in self.config.taps]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(parts, -1))  # type: ignore[no-any-return]

    def forward(self, embedded: Tensor, fused: Tensor, pending: Tensor, steps: int) -> list[Tensor]:
        """Unroll drafts that begin after pending tokens.

        Args:
            embedded: Embeddings of the documents, [B, T, H].
            fused: Fused taps of the documents, [B, T, H].
            pending: Places of the pending tokens, [B, P].
            steps: Tokens of each draft.

        Returns:
            Normed output [B, P, H] of each step.
        """
        layer: _DraftLayer = self.layers[0]  # type: ignore[assignment]
        places = torch.arange(fused.shape[1], device=fused.device)
        start = pending - 1  # the row that pairs the state before the pending token with that token
        joined = layer.join(embedded.roll(-1, 1), fused)
        true = layer.self_attn.keys(joined, factors(self._rotary, places[None].expand(len(fused), -1)))
        mask = torch.zeros(*pending.shape, len(places), dtype=true[0].dtype, device=fused.device)
        mask = mask.masked_fill(places > start[..., None], -torch.inf)[:, None, None]
        drafted: list[tuple[Tensor, Tensor]] = []
        x, hidden = gather(joined, start), gather(fused, start)
        outputs: list[Tensor] = []
        for step in range(steps):
            rope = factors(self._rotary, start + step)
            if step:
                x = layer.join(gather(embedded, pending + step), hidden)
                drafted.append(layer.self_attn.keys(x, rope))
            hidden = hidden + layer.self_attn(x, rope, true, mask, drafted)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(self.norm(hidden))
            if self.config.norm_output:
                hidden = outputs[-1]
        return outputs


class Eagle3Recipe(Recipe):
    """Recipe of an EAGLE-3 head. Its output head over the draft vocabulary is trained too."""

    config: EagleConfig
    module: Head

    def __init__(self, config: EagleConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int) -> None:
        """Build the network. `vocabulary` [draft_vocab] holds ascending token ids of the target."""
        super().__init__(config, Head(config), target, vocabulary, steps)
        self.start_at_unit_logits(self.module.norm)
        with torch.no_grad():
            self.module.lm_head.weight.copy_(self.teacher.rows)

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """See `Recipe.begin_from`. Tokens that the old vocabulary lacks begin with the target's output rows."""
        super().begin_from(self.by_token(head, "lm_head.weight", self.module.lm_head.weight))

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        embedded = self.target.embed(batch.tokens).float().clone()  # autograd refuses tensors made in inference mode
        outputs = self.module(embedded, self.module.fuse(batch), places.pending, self.steps)
        rows = tally.rows(self.module.lm_head.weight)
        for output, real in zip(outputs, places.real, strict=True):
            tally.add(F.linear(output[real], rows))

    def tensors(self) -> dict[str, Tensor]:
        return complete_token_maps(self.config, super().tensors() | {"d2t": self.teacher.d2t})
