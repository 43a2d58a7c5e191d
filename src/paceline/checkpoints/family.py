"""Data that describes a family of models. Each family has a file in `families/`."""

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
"""Names of the parts of Llama's layers in GGUF files -> their Hugging Face names."""
QK_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
POST_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of norms before and after attention and MLP."""


def experts_named(block: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Return the names of the experts' gate, up and down projections in `block`. GGUF files stack them."""
    return {f"ffn_{part}_exps": f"{block}.{{}}.{name}" for part, name in zip(_PARTS, names, strict=True)}


def shared_expert_named(block: str) -> Names:
    """Return the names of the shared expert's projections in `block`."""
    return {f"ffn_{part}_shexp": f"{block}.{part}_proj" for part in _PARTS}


_PARTS = ("gate", "up", "down")

MIXTURE_KEYS: Mapping[str, FieldKind] = {
    **each(EXPERT_COUNT, "num_experts", "num_local_experts", "num_experts_per_tok"),
    "moe_intermediate_size": ROWS,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": whole(1),
    "mlp_only_layers": listed(whole()) | NULL,
}
"""Config keys of a mixture of experts, with the names that most families use."""


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Layout of one architecture in GGUF files.

    Attributes:
        architecture: Name of the architecture, "general.architecture".
        names: Part of a layer -> its Hugging Face name.
        experts: The same for parts that stack all experts along the first dimension. "{}" is replaced by the expert.
        whole: Part of a layer -> Hugging Face name, for names that do not end in ".weight" or ".bias".
        top: Names outside of layers, in addition to the names that all architectures share.
        interleaved: In query and key rows, the two elements of each rotary pair are adjacent. Hugging Face stores all
            first elements before all second elements.
        shifted: Norm weights include the 1 that Hugging Face's code adds.
        read: Function from the metadata and the common config to the config entries of this architecture, under Hugging
            Face's keys.
        keys: Types of the architecture's own metadata.
        strips_spaces: Added tokens of the tokenizer absorb the white space after them.
        uneven: Some layers lack heads or an MLP.
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
        title: The family's models as the documentation names them; "" for an alias of another family.
        defaults: Values of keys that a config may omit. Includes all keys of `model_config.PECULIAR` that the family
            reads.
        keys: Types of the family's own keys.
        refine: Function from the config (with defaults) and the common `ModelConfig` to the family's `ModelConfig`.
        rope: Function from the config's rope scaling to the rope scaling of the common `ModelConfig.rope`. A config may
            have several, by layer type or by modality.
        interleaved: In the files, the two elements of each rotary pair are adjacent.
        rotary_key: Key of the head size, or of the rotated part's size if heads also have other parts.
        names: Parts of tensor names in the files -> parts of Llama's names, replaced one after the other.
        tensors: Function from the config and the renamed tensors to the decoder's tensors.
        turned: Stacks of experts are [experts, in, out].
        unlike_file: Function from the config and a module to the reason why the decoder's weights of this module differ
            from the trained weights in more than their names; None if they do not.
        quantised: Quantisation methods whose tensors the family reads.
        part_of: `model_type`s of multimodal models that contain this language model.
        mtp_follows: MTP layers follow the model's own layers, under DeepSeek's names.
        mtp_early: An MTP layer reads the stream before the final norm, and before the embedding.
        gguf: Layouts of the family's architectures in GGUF files.
        goldens: Cases of the golden test, as keys of a tiny model in addition to `tests.support.tiny_families.SIZES`.
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
    part_of: tuple[str, ...] = ()
    mtp_follows: bool = False
    mtp_early: bool = False
    gguf: tuple[GGUFLayout, ...] = ()
    goldens: Mapping[str, Raw] = field(default_factory=dict)
