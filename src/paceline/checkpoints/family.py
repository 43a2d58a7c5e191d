"""The data that describe a family of models. Each family has a file in `families/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.files.schema import EXPERT_COUNT, FLAG, NULL, ROWS, FieldKind, each, integer, list_of
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
"""Names in GGUF files of the norms before and after attention and the MLP -> their Hugging Face names."""


def experts_named(block: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Return the names of the experts' gate, up and down projections in `block`. In GGUF files, they are stacks."""
    return {f"ffn_{part}_exps": f"{block}.{{}}.{name}" for part, name in zip(_PARTS, names, strict=True)}


def shared_expert_named(block: str) -> Names:
    """Return the names of the shared expert's projections in `block`."""
    return {f"ffn_{part}_shexp": f"{block}.{part}_proj" for part in _PARTS}


_PARTS = ("gate", "up", "down")

MIXTURE_KEYS: Mapping[str, FieldKind] = {
    **each(EXPERT_COUNT, "num_experts", "num_local_experts", "num_experts_per_tok"),
    "moe_intermediate_size": ROWS,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": integer(1),
    "mlp_only_layers": list_of(integer()) | NULL,
}
"""Config keys of a mixture of experts, under the names that most families use."""


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """The layout of one architecture in GGUF files.

    Attributes:
        architecture: Name of the architecture, the value of "general.architecture".
        names: GGUF name of a part of a layer -> its Hugging Face name.
        experts: The same for parts that stack all experts along the first dimension. The expert's index replaces "{}".
        exact_names: The same for full names, which do not end in ".weight" or ".bias".
        top_level: The same for tensors outside of layers, in addition to the names that all architectures share.
        interleaved: True if, in query and key rows, the two elements of each rotary pair are adjacent. Hugging Face
            stores all first elements before all second elements.
        norms_include_one: True if norm weights include the 1 that Hugging Face's code adds.
        read: Maps the metadata and the common config to the config entries of this architecture, under Hugging Face's
            keys.
        keys: Types of the metadata that only this architecture has, by key.
        strips_spaces: True if added tokens of the tokenizer absorb the white space after them.
        uneven: True if some layers have no heads or no MLP.
        own_sizes: True if the sizes of heads and MLPs may differ from layer to layer. `read` then reads them.
    """

    architecture: str
    names: Names = field(default_factory=lambda: LAYER)
    experts: Names = field(default_factory=dict)
    exact_names: Names = field(default_factory=dict)
    top_level: Names = field(default_factory=dict)
    interleaved: bool = False
    norms_include_one: bool = False
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
        title: The name of the family's models in the documentation. Empty for an alias of another family.
        defaults: Values of the keys that a config may omit. They include all keys of `model_config.COMPUTATION_KEYS`
            that the family reads.
        keys: Types of the config keys that only this family has, by key.
        refine: Maps the config (with defaults) and the common `ModelConfig` to the family's `ModelConfig`.
        rope: Maps the config's rope scaling to the rope scaling of the common `ModelConfig.rope`. A config may have
            several, by layer type or by modality.
        interleaved: True if the two elements of each rotary pair are adjacent in the files.
        rotary_key: Config key of the head size. If only a part of each head is rotated, the key of that part's size.
        names: Parts of tensor names in the files -> parts of Llama's names. They are replaced one after the other.
        tensors: Maps the config and the renamed tensors to the decoder's tensors.
        transposed: True if stacks of experts have the shape [experts, in, out].
        unlike_file: Maps the config and a module to the reason why the decoder's weights of this module differ from the
            trained weights in more than their names. The result is None if they do not.
        quantised: Quantisation methods whose tensors can be read.
        part_of: `model_type`s of multimodal models that contain this language model.
        mtp_follows: True if MTP layers follow the model's own layers, under DeepSeek's names.
        mtp_early: True if an MTP layer reads the stream before the final norm, and takes it before the embedding.
        gguf: The layouts of the family's architectures in GGUF files.
        goldens: Cases of the golden test. Each adds keys to the config of a tiny model
            (`tests.support.tiny_families.SIZES`).
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
    transposed: bool = False
    unlike_file: Callable[[Raw, str], str | None] = lambda raw, module: None
    quantised: tuple[str, ...] = ()
    part_of: tuple[str, ...] = ()
    mtp_follows: bool = False
    mtp_early: bool = False
    gguf: tuple[GGUFLayout, ...] = ()
    goldens: Mapping[str, Raw] = field(default_factory=dict)
