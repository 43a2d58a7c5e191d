"""Causal language models of transformers as targets, with Paceline's masks and KV cache."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache
from logging import getLogger
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from paceline.cache.layout import NONE, ancestors, depths
from paceline.errors import CorruptModel, InvalidOption, UnsupportedModel, is_out_of_memory
from paceline.models.refusals import refuse_other_kinds
from paceline.models.transformers_cache import SlotCache
from paceline.models.transformers_check import verification_error
from paceline.models.transformers_excerpt import first_layers
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Tap, Want
from paceline.verify.tree import MIN_ROWS

_LOG = getLogger("paceline")

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""Names of the context length in the configs of different models."""


_CHECKED: WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[bool, bool]]] = WeakKeyDictionary()
"""The results of the check for each model, by dtype, device and attention: True if the model can verify trees, and True
if its first layers can run as a separate model."""


class CausalLM:
    """A `PreTrainedModel` with a causal head as a `Target`. The model keeps its dtype and its devices.

    `trees` is True if the model's attention accepts the mask of a tree. Models that do not accept such a mask (ALiBi in
    Bloom and MPT) run one slot at a time, and verify only chains. Both ways are checked against the model's plain
    forward pass when the object is created.
    """

    rows_are_independent = False
    """See `protocols.Divisible`."""

    def __init__(self, model: PreTrainedModel, wrapper: Any = None) -> None:
        """Wrap a model, and set it to `eval()`.

        Args:
            model: The model.
            wrapper: The `PeftModel` around it, if there is one. Each slot may then use one of its LoRA adapters.
                Adapter number 0 stands for the model as given, with its active adapter.

        Raises:
            UnsupportedModel: If the model's cache cannot drop rejected tokens, or its results differ from its plain
                forward pass.
        """
        refuse(model)
        if model.get_input_embeddings().weight.device.type == "meta":
            raise UnsupportedModel(
                f"the embedding of {type(model).__name__} is offloaded", "Load the model onto a device"
            )
        self.model, self._wrapper = model.eval(), wrapper
        self.adapters: tuple[str, ...] = mixable(wrapper) if wrapper else ()
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._config = model.config.get_text_config(decoder=True)
        self._windows = _windows(self._config)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = self._config.vocab_size
        self.layers: int = self._config.num_hidden_layers
        key = (self.dtype, self.device, self._config._attn_implementation)
        known = _CHECKED.setdefault(model, {})
        if key not in known:
            known[key] = self._check()
        self.trees, self._divisible = known[key]
        # If only chains can be verified, leave room for padding rows, which take positions after the chain.
        self.context_length = _context_length(self._config) - (0 if self.trees else MIN_ROWS)

    def _check(self) -> tuple[bool, bool]:
        """Return True if the model verifies trees, and True if its first layers were enough for the check.

        The check is tried with the first layers first. Raise `UnsupportedModel` if the model cannot even verify chains.
        """
        reason = None
        targets = dict.fromkeys((self._first_layers(), self))
        for trees in (True, False) if self._takes_positions and self._windows is not None else (False,):
            for one in targets:
                one.trees = trees
                reason = verification_error(one, trees, one._plain)
                if reason is None:
                    return trees, one is not self
        raise UnsupportedModel(
            f"{type(self.model).__name__} cannot verify a draft: {reason}", "Use the model without Paceline"
        )

    def _first_layers(self) -> CausalLM:
        """Return a target made of the first layers. On a GPU, or if the layers cannot be separated, return this
        target."""
        if self.device.type != "cpu":
            return self
        try:
            model = first_layers(self.model)
        except Exception:  # for example because the config does not allow another number of layers
            _LOG.debug("all layers of %s are checked, not only the first", type(self.model).__name__, exc_info=True)
            return self
        if model is self.model:
            return self
        short = copy(self)
        short.model = model
        return short

    def excerpt(self) -> CausalLM:
        """See `protocols.Divisible`. With adapters, this is the whole model, because passes run through the PEFT
        wrapper."""
        return self._first_layers() if self._divisible and not self.adapters else self

    def new_cache(self) -> SlotCache:
        return SlotCache(self.trees)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache[Cache], want: Want) -> Forward:
        """See `protocols.Target.forward`."""
        if want.layers is not None:
            raise UnsupportedModel(
                f"{type(self.model).__name__} is run by transformers, which does not stop after {want.layers} layers",
                "Use early exit with an architecture that Paceline implements natively",
            )
        if self.trees and self._windows:
            return self._pass(rows, cache, want, {"attention_mask": self._masks(rows, self._windows)})
        return _join([self._pass(one, cache, want, {}) for one in _chains(rows)])

    def _pass(self, rows: Rows, cache: KVCache[Cache], want: Want, inputs: dict[str, Any]) -> Forward:
        if self._takes_positions:
            inputs["position_ids"] = rows.positions
        if self._takes_logits_to_keep and want.logits != "all":
            inputs["logits_to_keep"] = 1
        numbers = [cache.adapters[slot] for slot in rows.slots]
        run = self.model
        if any(numbers):
            names = (self._wrapper.active_adapter, *self.adapters)
            run, inputs["adapter_names"] = self._wrapper, [names[number] for number in numbers]
        out = run(
            input_ids=rows.tokens,
            past_key_values=cache.begin(rows),
            use_cache=True,
            return_dict=True,
            output_hidden_states=bool(want.taps),
            **inputs,
        )
        states: dict[Tap, Tensor] = {tap: out.hidden_states[-1 if tap == "final" else tap] for tap in want.taps}
        count = {"all": out.logits.shape[1], "last": 1, "none": 0}[want.logits]
        logits = out.logits[:, out.logits.shape[1] - count :]
        return Forward(logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32), states)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        states: Tensor = self.model.get_input_embeddings()(tokens)
        return states

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`. If the model applies a softcap or a scale after its head, the result does
        not include it."""
        logits: Tensor = self.model.get_output_embeddings()(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def head(self) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`. As in `logits`, the result includes only the head's bias."""
        bias: Tensor | None = self.model.get_output_embeddings().bias
        return products if bias is None else products.add_(bias.detach()[tokens])

    @torch.inference_mode()
    def _plain(self, texts: Tensor) -> Tensor:
        """Return the logits [B, T, V] of whole texts [B, T] from one plain forward pass of the model."""
        return self.model(input_ids=texts, use_cache=False, return_dict=True).logits  # type: ignore[no-any-return]

    def _masks(self, rows: Rows, windows: Mapping[str, int | None]) -> Tensor | dict[str, Tensor]:
        """Return 4D masks [B, 1, T, columns] in transformers' form: a single mask, or one mask per type of layer if
        they differ."""
        visible, distance = _visible(rows)
        masks = {
            kind: self._mask(visible if window is None else visible & (distance < window))
            for kind, window in windows.items()
        }
        return masks.get("", masks)

    def _mask(self, visible: Tensor) -> Tensor:
        """Return a boolean mask for torch's attention, or an additive mask for eager attention."""
        if self._config._attn_implementation == "sdpa":
            return visible[:, None]
        zeros = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return zeros.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]


def mixable(wrapper: Any) -> tuple[str, ...]:
    """Return the names of the adapters in a `PeftModel` that can be mixed in one pass: LoRA adapters without DoRA.

    Raises:
        UnsupportedModel: If the model has a learned prompt.
    """
    configs = wrapper.peft_config
    if any(config.is_prompt_learning for config in configs.values()):
        raise UnsupportedModel("this PeftModel has a learned prompt, which Paceline does not support", "Use a LoRA")
    plain = all(config.peft_type.value == "LORA" and not config.use_dora for config in configs.values())
    return tuple(configs) if plain and isinstance(wrapper.active_adapter, str) else ()


def check_config(path: Path) -> None:
    """Check the config in a folder, without reading weights and without messages from transformers.

    Raises:
        UnsupportedModel: If transformers has no causal language model for the config, or speculation cannot run on it.
    """
    with _silence():
        with _refusing(path):
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModel(
                f"transformers has no causal language model of type {config.model_type!r}", "Use a decoder-only model"
            )
        with _refusing(path), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        refuse(model)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress messages from transformers."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def from_pretrained(path: Path, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Load a folder in Hugging Face layout.

    Raises:
        UnsupportedModel: If transformers cannot load the model, or speculation cannot run on it.
        CorruptModel: If the weights lack a tensor, which transformers would initialise randomly.
    """
    with _refusing(path):
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    if missing := found["missing_keys"]:
        raise CorruptModel(
            f"the weights in {path} lack {len(missing)} tensors ({min(missing)})", "Fetch the model again"
        )
    return CausalLM(model.to(device))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Convert any exception that transformers raises to `UnsupportedModel`, except errors that mean a lack of
    memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Quote only the first sentence. Add the name of the exception, because some messages mean nothing without it.
        reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise UnsupportedModel(
            f"transformers does not load {path} ({type(error).__name__}: {reason})", "Use another model"
        ) from error


def refuse(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel`, with the reason, for a model on which speculation cannot run."""
    name = type(model).__name__
    config = model.config
    refuse_other_kinds({**config.to_dict(), "architectures": [name]})
    attention = config.get_text_config(decoder=True)._attn_implementation
    fix = "Use an attention-only model"
    if model._is_stateful:
        raise UnsupportedModel(f"{name} keeps a recurrent state, which cannot drop rejected tokens", fix)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        named = ", ".join(sorted(kind.__name__ for kind in others))
        raise UnsupportedModel(f"{name} caches its past in {named}, which cannot drop rejected tokens", fix)
    if any(getattr(part, "is_causal", True) is False for part in model.modules()):
        fix = "Use a causal model (is_decoder=True in its config)"
        raise UnsupportedModel(f"{name} attends in both directions", fix)
    if attention not in ("sdpa", "eager"):
        fix = 'Load it with attn_implementation="sdpa"'
        raise UnsupportedModel(f"{name} uses {attention} attention, which takes no tree mask", fix)


def _windows(config: Any) -> Mapping[str, int | None] | None:
    """Return the sliding window (None for full attention) of each type of layer, or {"": window} if all layers use the
    same mask.

    Return None if the model builds its own masks, which a tree's mask cannot replace.
    """
    layers = DynamicCache(config=config).layers
    windows = {layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}
    settings = config.to_dict()
    by_column = any(name.endswith("window_size") for name in settings)  # GPT-Neo counts columns, not positions
    named = set(settings.get("layer_types") or ())
    if by_column or len(windows) > 1 or named - {"full_attention", "sliding_attention"}:
        return None
    window = windows.pop() if windows else None
    return {"full_attention": None, "sliding_attention": window} if named and window else {"": window}


def _context_length(config: Any) -> int:
    """Return the config's context length, or 2**31 if it has none.

    With longrope, the rotary factors change at a certain length. The context then ends at that length, because keys in
    the cache were computed with the old factors.
    """
    settings = config.to_dict()
    limit = next((int(settings[name]) for name in _LENGTHS if settings.get(name)), 2**31)
    rope = settings.get("rope_parameters") or {}
    # The config has either a single set of rope parameters, or one set for each type of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            short = part.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
            limit = min(limit, int(short or limit))
    return limit


@lru_cache(maxsize=256)
def _tree(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the ancestors (bool [T, T]) and the depths [T] of a tree's rows."""
    return ancestors(parents), torch.tensor(depths(parents))


def _visible(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the columns that each row attends to, and the distance of each column in the text, both [B, T,
    columns]."""
    count = rows.tokens.shape[1]
    visible = torch.zeros(len(rows.slots), count, rows.end, dtype=torch.bool)
    columns = torch.arange(rows.end).repeat(len(rows.slots), 1)
    for slot, (length, start, parents) in enumerate(zip(rows.lengths, rows.starts, rows.parents, strict=True)):
        seen, deep = _tree(parents)
        visible[slot, :, :length] = True
        visible[slot, :, length : length + len(parents)] = seen[start:]
        columns[slot, length : length + len(parents)] = length + deep
    device = rows.positions.device
    return visible.to(device), rows.positions[:, :, None] - columns.to(device)[:, None]


def _chains(rows: Rows) -> Iterator[Rows]:
    """Split a pass into one pass per slot. Raise `InvalidOption` if a slot has a tree."""
    for i, parents in enumerate(rows.parents):
        chain = next((r for r in range(1, len(parents)) if parents[r] == NONE), len(parents))
        if parents != (*range(NONE, chain - 1), *[NONE] * (len(parents) - chain)):
            raise InvalidOption("this model only verifies chains, but was given a tree", "Set draft to a length")
        one = slice(i, i + 1)
        fields = ("tokens", "positions", "slots", "lengths", "starts", "counts")
        yield replace(rows, parents=(parents,), **{name: getattr(rows, name)[one] for name in fields})


def _join(parts: list[Forward]) -> Forward:
    """Join the results of passes over single slots into a batch."""
    if len(parts) == 1:
        return parts[0]
    taps = {tap: torch.cat([part.taps[tap] for part in parts]) for tap in parts[0].taps}
    return Forward(torch.cat([part.logits for part in parts]), taps)
