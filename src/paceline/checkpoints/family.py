"""Description of a family of models as data. Each has a file in `families/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.files.schema import EXPERT_COUNT, FLAG, NULL, ROWS, FieldKind, each, listed, whole
from paceline.models.config import ModelConfig

Raw = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Names = Mapping[str, str]

LAYER: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of Llama's layers in GGUF files, and their names in Hugging Face's."""
QK_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
POST_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and after attention and feed-forward part."""


def experts_named(block: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Return names of the gate, up and down projections of the experts in `block`, which GGUF files stack."""
    return {f"ffn_{part}_exps": f"{block}.{{}}.{name}" for part, name in zip(_PARTS, names, strict=True)}


def shared_expert_named(block: str) -> Names:
    """Return names of the expert that every row uses."""
    return {f"ffn_{part}_shexp": f"{block}.{part}_proj" for part in _PARTS}


_PARTS = ("gate", "up", "down")

MIXTURE_KEYS: Mapping[str, FieldKind] = {
    **each(EXPERT_COUNT, "num_experts", "num_local_experts", "num_experts_per_tok"),
    "moe_intermediate_size": ROWS,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": whole(1),
    "mlp_only_layers": listed(whole()) | NULL,
}
"""Keys of a mixture of experts, as most families call them."""


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """One architecture of GGUF files.

    Attributes:
        architecture: Its name, "general.architecture".
        names: Part of a layer -> Hugging Face's name.
        experts: The same for parts that stack all experts along their first dimension; "{}" stands for the expert.
        whole: Part -> Hugging Face's name, where neither ends in ".weight" or ".bias".
        top: Names that belong to no layer, besides the names of all architectures.
        interleaved: Query and key rows are stored with the two halves of each rotary pair side by side, while Hugging
            Face has all first halves before all second ones.
        shifted: Norms are stored with the 1 added that Hugging Face's code adds.
        read: From the metadata, and the config that all architectures share, to what is different in this one, in
            Hugging Face's terms.
        keys: Kinds of its own metadata.
        strips_spaces: Added tokens of its tokenizer absorb the white space after them.
        uneven: Some layers lack heads, or a feed-forward part.
        own_sizes: `read` reads the sizes of heads and layers, which may differ from layer to layer.
    """

    architecture: str
    names: Names = field(default_factory=lambda: LAYER)
    experts: Names = field(default_factory=dict)
    whole: Names = field(default_factory=dict)
    top: Names = field(default_factory=dict)
    interleaved: bool = False
    shifted: bool = False
    read: Callable[[Metadata, Config], Config] = lambda meta, config: {}
    keys: Mapping[str, FieldKind] = field(default_factory=dict)
    strips_spaces: bool = False
    uneven: bool = False
    own_sizes: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
        name: The `model_type`.
        title: Its models, as the documentation names them; "": it is another's alias.
        defaults: Values of keys that a config may omit. They name all keys of `model_config.PECULIAR` that it reads.
        keys: Kinds of its own keys.
        refine: From the config, defaults included, and the part that all families share to the whole.
        rope: From the rope scaling of the config to that of the layers without a window.
        interleaved: The two halves of each rotary pair lie side by side in its files.
        rotary_key: Key of the size of a head, or of its part that is rotated if heads have several.
        names: Parts of tensor names in its files -> parts of Llama's names, replaced one after the other.
        tensors: From the config and the renamed tensors to what the decoder takes.
        turned: Its stacks of experts are [experts, in, out].
        unlike_file: From the config and a module to how the decoder's weights of the module differ from trained ones in
            more than their names; None: not at all.
        quantised: Methods of quantisation whose tensors it reads.
        part_of: `model_type` of models that also see, whose language model it is.
        mtp_follows: Layers that predict later tokens follow the model's own, under DeepSeek's names.
        mtp_early: Such a layer sees the stream before the last norm, and ahead of the embedding.
        gguf: Its architectures in GGUF files.
        goldens: Cases of its golden test: keys of a tiny model, beyond `tests.support.tiny_families.SIZES`.
    """

    name: str
    title: str = ""
    defaults: Raw = field(default_factory=dict)
    keys: Mapping[str, FieldKind] = field(default_factory=dict)
    refine: Callable[[Raw, ModelConfig], ModelConfig] = lambda raw, base: base
    rope: Callable[[Raw], Raw] = lambda scaling: scaling
    interleaved: bool = False
    rotary_key: str = "head_dim"
    names: Names = field(default_factory=dict)
    tensors: Callable[[Raw, Tensors], Tensors] = lambda raw, tensors: tensors
    turned: bool = False
    unlike_file: Callable[[Raw, str], str | None] = lambda raw, module: None
    quantised: tuple[str, ...] = ()
    part_of: str = ""
    mtp_follows: bool = False
    mtp_early: bool = False
    gguf: tuple[GGUFLayout, ...] = ()
    goldens: Mapping[str, Raw] = field(default_factory=dict)
