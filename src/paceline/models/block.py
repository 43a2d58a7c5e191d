"""The network of a block drafter (DFlash, arXiv 2602.06036), which drafts a whole block in one pass.

It follows the published implementations (z-lab/dflash `dflash/model.py`; vllm-project/speculators `models/dflash/`;
vLLM `qwen3_dflash.py`; SpecForge `dflash_family_model.py`):

- **Context.** The hidden states of a token at all taps are concatenated in the config's order and pass through `fc` and
  `hidden_norm`. Every layer computes the token's key (`k_proj`, `k_norm`, rotary) and value (`v_proj`) from this one
  vector, without `input_layernorm`. One matrix multiplication therefore computes the keys and values of all
  layers.
- **Block.** The first entry is the pending token, whose hidden states are not known yet. The other entries are mask
  tokens, embedded by the target. Entry j is at the pending token's position + j, and predicts the token at its own
  position, or at the next position if `from_anchor` is set. The network always receives a whole block, as in training.
- **Attention.** An entry attends to the context and to its whole block, in both directions. In layers marked `causal`,
  it attends only to earlier entries of the block, because drafters with sliding windows are trained that way. A window
  includes the entry itself.
- **Taps.** `target_layer_ids` name layer outputs, `hidden_states[id + 1]`: the stream that enters layer id + 1.
  Speculators already counts that way.
- **Markov head** (DSpark; DeepSpec, speculators `models/dspark/`). W2 W1[t] is added to the logits of an entry, where t
  is the token before the predicted token: at first the pending token, then drafted tokens. A confidence head estimates
  from the entry's normed state and W1[t] how likely the best token is to be accepted.
- **DFlash 2** (inco.ai/blog/dflash2; vLLM `qwen3_dflash2.py`, SpecForge `dflash2.py`). Each part of a layer runs
  between two convolutions (`models/convolved.py`). The path selector keeps the `selector_top_k` tokens of an entry with
  the highest logits U. It scores token b after token a with U(b) + <A(a) * H(h), B(b)>, where A and B are rows of the
  codebooks and H(h) is the `hidden_projection` of the entry's normed state.
- **Embedding and head** are the target's. Speculators may store only some rows of the head, with their token ids in
  `d2t`. `norm` is applied before the head.
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
    """The layers that turn a target's hidden states into the input of an output head."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], host: TargetWithHead) -> None:
        """Build the network.

        Args:
            config: The head's architecture.
            tensors: Weights, under the names in `heads.py`.
            host: The target, for its embedding, output head, dtype, device and context length.

        Raises:
            CorruptModel: If a tensor is missing or has the wrong shape.
        """
        c = config.layer
        self.config, self._device = config, host.device
        weights = Weights(tensors, host.dtype, host.device)
        self._fuse = weights.linear({"fc": c.hidden}, len(config.taps) * c.hidden)
        self._fused_norm = make_norm(c, weights, "hidden_norm", c.hidden)
        names = [f"layers.{i}." for i in range(c.layers)]
        parts = {f"{name}self_attn.{x}_proj": c.kv_heads * c.head_dim for name in names for x in "kv"}
        # A single linear layer computes the context's keys and values for all layers.
        self._keys_values = weights.linear(parts, c.hidden)
        layers = [make_layer(c, layer, weights, name) for layer, name in zip(c.plan, names, strict=True)]
        if config.conv:
            layers = [_convolved(config, layer, weights, name) for layer, name in zip(layers, names, strict=True)]
        self._head_norms = [layer.mixer.norm for layer in layers if isinstance(layer.mixer, Attention)]
        self._stack = LayerStack(c, layers, host, [not causal for causal in config.causal or (False,) * c.layers])
        self._norm = make_norm(c, weights, "norm", c.hidden)
        self.subset, self.logits = output_head(weights, host, config.draft_vocab or host.vocab_size, c.hidden)
        """The token ids of the logits' columns (None for the target's whole vocabulary), and a function that maps the
        states that `draft` returns to logits [..., C]."""
        self._follow = _follower(config, weights, host.vocab_size)
        weights.finish()

    def new_cache(self) -> SlabCache:
        """Create a cache for the host's context length. The length that the head was trained on does not matter."""
        return self._stack.new_cache()

    @torch.inference_mode()
    def read(self, cache: SlabCache, slots: Sequence[int], features: Tensor, counts: Sequence[int]) -> None:
        """Append the target's hidden states of the next tokens to each slot's context.

        Args:
            cache: The drafter's cache, from `new_cache`.
            slots: Slots of that cache.
            features: Hidden states [B, n, taps * H]. Slot b has counts[b] valid rows, and the other rows are padding.
            counts: Number of valid rows per slot.
        """
        b, n, _ = features.shape
        rows, view, ropes = self._begin(cache, slots, [cache.lengths[slot] for slot in slots], n)
        both = self._keys_values(self._fused_norm(self._fuse(features)))
        c = self.config.layer
        keys, values = both.view(b, n, c.layers, 2, c.kv_heads, c.head_dim).unbind(3)
        for i, (norm, kind) in enumerate(zip(self._head_norms, self._stack.ropes.index, strict=True)):
            k, rope = norm(keys[:, :, i]) if norm else keys[:, :, i], ropes[kind]
            view.write(i, rotate(k, *rope) if rope else k, values[:, :, i])
        cache.commit(rows, [range(1, count) if count else None for count in counts])

    @torch.inference_mode()
    def draft(self, cache: SlabCache, slots: Sequence[int], first: Sequence[int], x: Tensor) -> Tensor:
        """Run embedded blocks through the layers. This commits nothing to the cache.

        Args:
            cache: The drafter's cache.
            slots: Slots of that cache.
            first: Position of each slot's pending token.
            x: Embedded blocks [B, size, H].

        Returns:
            Normed states [B, size, H], the input of `logits`.
        """
        _, view, ropes = self._begin(cache, slots, first, x.shape[1])
        x, _ = self._stack.run(x, 0, self.config.layer.layers, ropes, view)
        return self._norm(x)

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Refine an entry's logits for each token that may precede the predicted token.

        Args:
            tokens: The n candidates for the token before the predicted token.
            state: The entry's normed state [H], as `draft` returns it.
            logits: The entry's logits [C].

        Returns:
            Logits [n, C], and the probability [n] that the best token is accepted (None without a confidence head).
        """
        assert self._follow is not None
        return self._follow(torch.tensor(tokens, device=self._device), state, logits)

    def _begin(
        self, cache: SlabCache, slots: Sequence[int], first: Sequence[int], count: int
    ) -> tuple[Rows, Pass, list[Rope]]:
        """Begin a pass of `count` consecutive rows per slot, starting at positions `first`. Return the rows, the pass
        and its rotary factors."""
        device = self._device
        positions = torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)
        chains = ((NONE, *range(count - 1)),) * len(slots)
        lengths = tuple(cache.lengths[slot] for slot in slots)
        # The positions take the place of token ids, which the cache never reads. Drafts need not be exact to the bit,
        # so use the faster prefill kernel.
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
            raise CorruptModel("d2t of the head is not in ascending order", "Fetch the head again")
        self._before = weights.get("markov_head.markov_w1.weight", (vocab, rank))
        self._after = linear(weights.head("markov_head.markov_w2.weight", (rows, rank))).precise
        self._wide = config.confidence > config.layer.hidden
        name = "confidence_head.proj."
        self._confidence_weight = weights.get(name + "weight", (1, config.confidence))[0] if config.confidence else None
        self._confidence_bias = weights.get(name + "bias", (1,)) if name + "bias" in weights else 0.0

    def __call__(self, tokens: Tensor, state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        before = self._before[tokens]
        logits = logits + self._after(before)
        if self._confidence_weight is None:
            return logits, None
        states = state.expand(len(tokens), -1)
        known = torch.cat([states, before], -1) if self._wide else states
        return logits, (known @ self._confidence_weight + self._confidence_bias).float().sigmoid()
