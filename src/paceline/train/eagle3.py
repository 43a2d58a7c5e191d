"""EAGLE-3's recipe (arXiv 2503.01840): the head is unrolled on its own outputs ("training-time test").

Row t of the head pairs the target's states at t with the embedding of token t + 1, has rotary position t, and guesses
token t + 2. Step 0 sees true states only. Step s goes on from step s - 1 of its own draft: it sees the true rows up
to where that draft began, and after them the draft's own rows, one per step, exactly as in decoding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.heads import EagleConfig, HeadFile
from paceline.models.rope import Rotary, rotate
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import MLP, Factors, Norm, factors
from paceline.train.recipe import Answered, Guesses, GuessTally, Recipe, Teacher, take
from paceline.train.states import DocumentBatch
from paceline.types import Tap

_DECAY = 0.8


def default_taps(layers: int) -> tuple[Tap, ...]:
    """An early, a middle and a late layer, as every published head has them."""
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


class _DraftAttention(nn.Module):
    """Grouped-query attention of drafts: over the true rows of their document, then over their own."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def keys(self, x: Tensor, rope: Factors) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, T, D] of rows x [B, T, 2H]."""
        both = F.linear(x, torch.cat([self.k_proj.weight, self.v_proj.weight]))
        k, v = both.unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, 2)
        return rotate(k, *rope).transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, rope: Factors, true: tuple[Tensor, Tensor], mask: Tensor, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [B, P, 2H], one row per draft. `true`: keys and values of the document, of which row p sees those where
        mask [B, 1, 1, P, T] is 0 and not -inf. `own`: those of the drafts' rows so far, [B, kv_heads, P, D] each."""
        b, p, _ = x.shape
        q = rotate(self.q_proj(x).view(b, p, self.heads, self.head_dim), *rope).transpose(1, 2)
        q = (q * self.head_dim**-0.5).unflatten(1, (self.kv_heads, -1))  # [B, kv, group, P, D]
        t = true[0].shape[2]
        scores = (q.flatten(2, 3) @ true[0].transpose(-1, -2)).view(*q.shape[:-1], t) + mask
        if own:
            scores = torch.cat([scores, torch.stack([(q * k[:, :, None]).sum(-1) for k, _ in own], -1)], -1)
        weights = scores.float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :t].flatten(2, 3) @ true[1]).view(q.shape)
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., t + i, None] * v[:, :, None]
        out: Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(b, p, -1))
        return out


class _DraftLayer(nn.Module):
    """A Llama layer whose attention sees [normed embedding | normed hidden state]."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = Norm(c.hidden, c.norm_eps), Norm(c.hidden, c.norm_eps)
        self.self_attn = _DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden, c.norm_eps)
        self.mlp = MLP(c)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)


class Head(nn.Module):
    """The network, with parameters named as in `models/heads.py`."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        normed = config.taps if config.fc_norm else ()
        self.fc_norm = nn.ModuleList(Norm(config.target_hidden, c.norm_eps) for _ in normed)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, c.hidden, bias=False)
        self.layers = nn.ModuleList([_DraftLayer(c)])
        self.norm = Norm(c.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        self._rotary = Rotary(c.rope, c.head_dim, torch.float32, torch.device("cpu"))

    def fuse(self, batch: DocumentBatch) -> Tensor:
        """The taps [B, T, H] that every row begins from."""
        parts = [batch.states[tap].float() for tap in self.config.taps]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(parts, -1))  # type: ignore[no-any-return]

    def forward(self, embedded: Tensor, fused: Tensor, pending: Tensor, steps: int) -> list[Tensor]:
        """The normed output [B, P, H] of each step of the drafts that begin after the tokens at `pending` [B, P].

        `embedded`, `fused` [B, T, H]: the documents.
        """
        layer: _DraftLayer = self.layers[0]  # type: ignore[assignment]
        places = torch.arange(fused.shape[1], device=fused.device)
        start = pending - 1  # the row that pairs the state before the pending token with that token
        joined = layer.join(embedded.roll(-1, 1), fused)
        true = layer.self_attn.keys(joined, factors(self._rotary, places[None].expand(len(fused), -1)))
        mask = torch.zeros(*pending.shape, len(places), dtype=true[0].dtype, device=fused.device)
        mask = mask.masked_fill(places > start[..., None], -torch.inf)[:, None, None]
        own: list[tuple[Tensor, Tensor]] = []
        x, hidden = take(joined, start), take(fused, start)
        outputs: list[Tensor] = []
        for step in range(steps):
            rope = factors(self._rotary, start + step)
            if step:
                x = layer.join(take(embedded, pending + step), hidden)
                own.append(layer.self_attn.keys(x, rope))
            hidden = hidden + layer.self_attn(x, rope, true, mask, own)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(self.norm(hidden))
            if self.config.norm_output:
                hidden = outputs[-1]
        return outputs


class Eagle3(Recipe):
    """Cross-entropy against the target's whole distribution over the draft vocabulary, later steps counting less."""

    module: Head

    def __init__(self, config: EagleConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int) -> None:
        """`vocabulary` [draft_vocab]: ascending ids of the target."""
        self.taps, self.steps = config.taps, steps
        self.module = Head(config)
        self._config, self._target = config, target
        self._teacher = Teacher(target, vocabulary)
        with torch.no_grad():
            self.module.lm_head.weight.copy_(self._teacher.kept)
            # Logits of a standard deviation of 1 to begin with: at the target's own scale, those of a head that knows
            # nothing yet are confident nonsense, and much of the training would go into unlearning them.
            self.module.norm.weight.fill_(1 / (self._teacher.kept.std() * config.layer.hidden**0.5))

    @property
    def config(self) -> EagleConfig:
        return self._config

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """Tokens that only the new vocabulary has begin at the target's rows."""
        theirs = head.tensors.get("lm_head.weight")
        if isinstance(head.config, EagleConfig) and theirs is not None:
            d2t = head.tensors.get("d2t", torch.zeros(len(theirs), dtype=torch.int64))
            row = torch.full((self._config.layer.vocab_size,), -1)
            row[torch.arange(len(theirs)) + d2t] = torch.arange(len(theirs))
            row = row[self._teacher.vocabulary.cpu()]
            rows = self.module.lm_head.weight.detach().clone()
            rows[row >= 0] = theirs[row[row >= 0]].to(rows)
            head = replace(head, tensors=dict(head.tensors) | {"lm_head.weight": rows})
        super().begin_from(head)

    def guess(self, batch: DocumentBatch) -> Guesses:
        answered = Answered.of(batch, self.steps)
        taught = self._teacher.of(batch, answered, exact=not self.module.training)
        embedded = self._target.embed(batch.tokens).float().clone()  # autograd refuses what inference mode made
        outputs = self.module(embedded, self.module.fuse(batch), answered.pending, self.steps)
        tally = GuessTally(self._teacher, taught, answered, _DECAY)
        for output, real in zip(outputs, answered.real, strict=True):
            tally.add(self.module.lm_head(output[real]))
        return tally.guesses()

    def tensors(self) -> dict[str, Tensor]:
        vocabulary = self._teacher.vocabulary.cpu()
        known = torch.zeros(self._config.layer.vocab_size, dtype=torch.bool)
        known[vocabulary] = True
        return super().tensors() | {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
