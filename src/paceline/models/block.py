"""The network of a block drafter (DFlash, arXiv 2602.06036): a whole block from one pass.

It follows the published implementations (z-lab/dflash `dflash/model.py`; vllm-project/speculators `models/dflash/`;
vLLM `qwen3_dflash.py`; SpecForge `dflash_family_model.py`):

- **Context.** The taps of a token, side by side in the config's order, pass `fc`, then `hidden_norm`. Every layer makes
  the token's key (`k_proj`, `k_norm`, rotary) and value (`v_proj`) from this one vector, without `input_layernorm`. So
  keys and values of all layers can be computed at once and kept.
- **Block.** Its first entry is the pending token, whose hidden states are not known yet; mask tokens follow, through
  the target's embedding. Entry j has the pending token's position + j and predicts the token of its own position (with
  `from_anchor` the next one). A block is always fed whole, as in training.
- **Attention.** An entry sees the context and its whole block, both ways. In layers marked `causal` it sees only the
  earlier part of the block: drafters with sliding windows are trained so. A window counts the entry itself.
- **Taps.** `target_layer_ids` are layer outputs, `hidden_states[id + 1]`: the stream entering layer id + 1. Speculators
  already counts that way.
- **Markov head** (DSpark; DeepSpec, speculators `models/dspark/`). The logits of an entry have W2 W1[t] added, t being
  the token before the one that it predicts: the pending one, then drafted ones. A confidence head tells from the
  entry's state, after `norm`, and from W1[t] how likely the best token is accepted.
- **DFlash 2** (inco.ai/blog/dflash2; vLLM `qwen3_dflash2.py`, SpecForge `dflash2.py`). `models/convolved.py` is around
  each part of its layers. Its path selector keeps the best `selector_top_k` tokens of an entry by its logits U, and
  scores token b after token a with U(b) + <A(a) * H(h), B(b)>: A and B are rows of the codebooks, H(h) the
  `hidden_projection` of the entry's state after `norm`.
- **Embedding and head** are the target's (speculators may store some rows of the head, with their tokens in `d2t`);
  `norm` comes before the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.cache.slab import SlabCache
from paceline.errors import CorruptModel
from paceline.kernels.linear import linear
from paceline.models.convolved import BlockConvolution, ConvolvedLayer
from paceline.models.decoder import make_layer
from paceline.models.heads import BlockConfig
from paceline.models.layers import Attention, Layer
from paceline.models.norms import make_norm
from paceline.models.output import output_head
from paceline.models.rope import Rope, rotate
from paceline.models.stack import LayerStack
from paceline.models.weights import Weights
from paceline.protocols import Pass, TargetWithHead
from paceline.types import Rows


class BlockNetwork:
    """The layers between a target's hidden states and its output head."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], host: TargetWithHead) -> None:
        """`tensors`: by the names in `heads.py`. Raises `CorruptModel` for missing or misshapen ones."""
        c = config.layer
        self.config, self._device = config, host.device
        weights = Weights(tensors, host.dtype, host.device)
        self._fuse = weights.linear({"fc": c.hidden}, len(config.taps) * c.hidden)
        self._fused_norm = make_norm(c, weights, "hidden_norm", c.hidden)
        names = [f"layers.{i}." for i in range(c.layers)]
        parts = {f"{name}self_attn.{x}_proj": c.kv_heads * c.head_dim for name in names for x in "kv"}
        # Keys and values of the context for all layers in one product.
        self._keys_values = weights.linear(parts, c.hidden)
        layers = [make_layer(c, layer, weights, name) for layer, name in zip(c.plan, names, strict=True)]
        if config.conv:
            layers = [_convolved(config, layer, weights, name) for layer, name in zip(layers, names, strict=True)]
        self._head_norms = [layer.attention.norm for layer in layers if isinstance(layer.attention, Attention)]
        self._stack = LayerStack(c, layers, host, [not late for late in config.causal or (False,) * c.layers])
        self._norm = make_norm(c, weights, "norm", c.hidden)
        self.subset, self.logits = output_head(weights, host, config.draft_vocab or host.vocab_size, c.hidden)
        """The tokens of the logits' columns (None: all of the target's), and logits [..., C] of a draft's states."""
        self._follow = _follower(config, weights, host.vocab_size)
        weights.finish()

    def new_cache(self) -> SlabCache:
        """A cache for the host's context length, whatever length the head was trained on."""
        return self._stack.new_cache()

    @torch.inference_mode()
    def read(self, cache: SlabCache, slots: Sequence[int], features: Tensor, counts: Sequence[int]) -> None:
        """Add the target's hidden states of the next tokens of each slot to its context.

        features [B, n, taps * H]: the first counts[b] rows of slot b, then padding.
        """
        b, n, _ = features.shape
        rows, attention, ropes = self._begin(cache, slots, [cache.lengths[slot] for slot in slots], n)
        both = self._keys_values(self._fused_norm(self._fuse(features)))
        c = self.config.layer
        keys, values = both.view(b, n, c.layers, 2, c.kv_heads, c.head_dim).unbind(3)
        for i, (norm, kind) in enumerate(zip(self._head_norms, self._stack.ropes.index, strict=True)):
            k, rope = norm(keys[:, :, i]) if norm else keys[:, :, i], ropes[kind]
            attention.write(i, rotate(k, *rope) if rope else k, values[:, :, i])
        cache.commit(rows, [range(1, count) if count else None for count in counts])

    @torch.inference_mode()
    def draft(self, cache: SlabCache, slots: Sequence[int], first: Sequence[int], x: Tensor) -> Tensor:
        """From embedded blocks x [B, size, H], with pending tokens at positions `first`, to the input of `logits`
        [B, size, H]. Commits nothing."""
        _, attention, ropes = self._begin(cache, slots, first, x.shape[1])
        x, _ = self._stack.run(x, 0, self.config.layer.layers, ropes, attention)
        return self._norm(x)

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of an entry with this input of `logits` [H] and these logits [C], for each token that may come before the
        one that it predicts: logits [n, C], and the probability [n] that its best token is accepted, if a head
        tells."""
        assert self._follow is not None
        return self._follow(torch.tensor(tokens, device=self._device), state, logits)

    def _begin(
        self, cache: SlabCache, slots: Sequence[int], first: Sequence[int], count: int
    ) -> tuple[Rows, Pass, list[Rope]]:
        """A pass of `count` rows per slot at positions from `first` on, and its rotary factors of every kind."""
        device = self._device
        positions = torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)
        chains = ((NONE, *range(count - 1)),) * len(slots)
        lengths = tuple(cache.lengths[slot] for slot in slots)
        # The cache does not read the tokens. Bits of drafts do not matter: the fast kernel (prefill) will do.
        starts = (0,) * len(slots)
        rows = Rows(positions, positions, tuple(slots), lengths, chains, starts, prefill=True)
        ropes = self._stack.ropes(positions, max(first) + count, [cache.prompts[slot] for slot in slots])
        return rows, cache.begin(rows), ropes


def _convolved(config: BlockConfig, layer: Layer, weights: Weights, name: str) -> ConvolvedLayer:
    sizes = config.layer.hidden, config.conv, config.conv_group
    attention, mlp = (BlockConvolution(weights, f"{name}{part}_conv.", *sizes) for part in ("attention", "mlp"))
    return ConvolvedLayer(layer, attention, mlp)


def _follower(config: BlockConfig, weights: Weights, vocab: int) -> _Markov | _Selector | None:
    if config.selector:
        return _Selector(config, weights, vocab)
    return _Markov(config, weights, vocab) if config.markov else None


class _Selector:
    """DFlash 2's path selector."""

    def __init__(self, config: BlockConfig, weights: Weights, vocab: int) -> None:
        rank, name = config.selector, "candidate_selector."
        self._before = weights.get(name + "predecessor_codebook", (vocab, rank))
        self._after = weights.get(name + "successor_codebook", (vocab, rank))
        self._project = weights.linear({name + "hidden_projection": rank}, config.layer.hidden).precise
        self._count = config.candidates

    def __call__(self, tokens: Tensor, state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        best, ids = logits.topk(self._count)
        before = self._before[tokens].to(best.dtype) * self._project(state[None]).to(best.dtype)
        scores = best + before @ self._after[ids].to(best.dtype).T
        none = logits.new_full((len(tokens), len(logits)), -torch.inf)
        return none.index_copy_(1, ids, scores), None


class _Markov:
    """DSpark's Markov head, and its confidence head if there is one."""

    def __init__(self, config: BlockConfig, weights: Weights, vocab: int) -> None:
        rank, rows = config.markov, config.draft_vocab or vocab
        if "d2t" in weights and not bool(weights.get("d2t", (rows,), torch.int64).diff().ge(0).all()):
            raise CorruptModel("d2t of the head does not rise from row to row", "Fetch the head again")
        self._before = weights.get("markov_head.markov_w1.weight", (vocab, rank))
        self._after = linear(weights.head("markov_head.markov_w2.weight", (rows, rank))).precise
        self._wide = config.confidence > config.layer.hidden
        name = "confidence_head.proj."
        self._sure = weights.get(name + "weight", (1, config.confidence))[0] if config.confidence else None
        self._bias = weights.get(name + "bias", (1,)) if name + "bias" in weights else 0.0

    def __call__(self, tokens: Tensor, state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        before = self._before[tokens]
        logits = logits + self._after(before)
        if self._sure is None:
            return logits, None
        states = state.expand(len(tokens), -1)
        known = torch.cat([states, before], -1) if self._wide else states
        return logits, (known @ self._sure + self._bias).float().sigmoid()
