"""Writers of learned drafters. Each kind has one layout:

eagle3   speculators, for vLLM and llama.cpp's converter
block    DFlash's own layout, for vLLM, SGLang and llama.cpp's converter; speculators for fields that it lacks
medusa   Paceline's layout: vLLM's names, but no output heads if the heads share the target's
exit     Paceline's layout
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoints import head_codes
from paceline.checkpoints.head_check import check_tensors
from paceline.checkpoints.head_dflash import DFLASH2
from paceline.checkpoints.head_files import EAGLE_FLAGS, complete_token_maps, holds_head
from paceline.checkpoints.layer_plans import FULL, SLIDING
from paceline.errors import CannotWrite, InvalidOption
from paceline.models.config import ModelConfig
from paceline.models.heads import AssistantConfig, BlockConfig, EagleConfig, HeadFile, MedusaConfig, kind_of

Raw = dict[str, Any]
Tensors = Mapping[str, Tensor]

_WEIGHTS = "model.safetensors"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
_SPECULATORS_VERSION = "0.9.0"
"""The release of `speculators` that defines the fields that are written."""

_DEFAULT_DRAFT_LENGTH = 5
"""Default draft length, in tokens. It is stored for other programs, whose users can change it."""


def write_head(folder: str | Path, head: HeadFile, bits: int = 16) -> Path:
    """Write a head to a folder that `open_head` can read. The folder appears completely or not at all.

    Args:
        folder: The folder. If it already holds a head, that head is replaced.
        head: The head. Its `path` and `layout` are ignored.
        bits: 16 to keep the dtypes of the tensors. 4 to quantise matrices to a form that other programs cannot read.

    Returns:
        The folder.

    Raises:
        InvalidOption: If the layout cannot express the head, or the folder holds something else.
        CorruptModel: If the tensors do not fit the config.
        CannotWrite: If writing fails.
    """
    if isinstance(head.config, AssistantConfig):
        raise InvalidOption("Gemma 4's assistants can be read but not written", "Copy the folder instead")
    folder = Path(folder).expanduser()
    tensors = complete_token_maps(head.config, head.tensors)
    check_tensors(folder, head.config, tensors)
    extra = {"kind": kind_of(head.config), "target": head.target, "target_layers": head.target_layers, **head.extra}
    extra["matrices"] = head_codes.FORMAT if bits == 4 else None
    if isinstance(head.config, MedusaConfig) and head.config.paths:
        extra["paths"] = [list(path) for path in head.config.paths]
    config = _config_json(head, tensors) | {"paceline": {k: v for k, v in extra.items() if v is not None}}
    check_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside: Any = {"dir": folder.parent, "prefix": f".{folder.name}."}
        with tempfile.TemporaryDirectory(**beside, ignore_cleanup_errors=True) as temporary:
            _fill(Path(temporary, "new"), config, head_codes.encode(tensors) if bits == 4 else tensors)
            _swap(folder, Path(temporary))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap disk errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        cause = f"cannot write the head {folder} ({reason})"
        raise CannotWrite(cause, "Check free disk space and permissions") from error
    return folder


def check_folder(folder: Path) -> None:
    """Raise `InvalidOption` if the path holds anything but a head, because writing a head would replace it."""
    if folder.exists() and not (folder.is_dir() and (holds_head(folder) or not any(folder.iterdir()))):
        raise InvalidOption(f"{folder} exists and holds no head", "Name a new folder")


def _swap(folder: Path, temporary: Path) -> None:
    """Replace the folder with `temporary`/new. If that fails, restore the old folder."""
    old = temporary / "old"
    if folder.exists():
        folder.rename(old)
    try:
        (temporary / "new").rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise


def _fill(folder: Path, config: Raw, tensors: Tensors) -> None:
    folder.mkdir()
    # Copy all tensors, because safetensors rejects tensors that share memory.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / _WEIGHTS, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / _WEIGHTS).chmod(file.stat().st_mode)  # safetensors creates files that only their owner can read


def _config_json(head: HeadFile, tensors: Tensors) -> Raw:
    """Return the fields of config.json, except the entry "paceline"."""
    c = head.config
    assert not isinstance(c, AssistantConfig)
    if isinstance(c, EagleConfig):
        return _eagle3(head, c, tensors)
    if isinstance(c, BlockConfig):
        # DFlash's own layout numbers taps by layer outputs, so it has no number for the stream that enters layer 0.
        only_speculators = c.from_anchor or c.draft_vocab or 0 in c.taps or c.markov
        return (_speculators_dflash if only_speculators else _dflash)(head, c, tensors)
    if isinstance(c, MedusaConfig):
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "paceline_kind": "medusa",
            "hidden_size": c.hidden,
            "vocab_size": c.vocab_size,
            "truncated_vocab_size": c.draft_vocab,
            "num_heads": c.heads,
            "num_hidden_layers": c.layers,
            "base_model_name_or_path": head.target,
        }
    return {"paceline_kind": "exit", "hidden_size": c.hidden, "layers": c.layers, "rank": c.rank}


def _refuse(reasons: Mapping[str, object]) -> None:
    if found := [name for name, present in reasons.items() if present]:
        raise InvalidOption(f"the head's layout has no field for {', '.join(found)}", "Write a head without it")


def _layer_fields(c: ModelConfig, family: str, tensors: Tensors) -> Raw:
    """Return a `ModelConfig` under Hugging Face's keys. Rotary embeddings are written under both the old keys and the
    keys of transformers 5."""
    _refuse({"explicit rotary factors": c.rope.factors})
    scaling = None if c.rope.kind == "default" else {"rope_type": c.rope.kind, **dict(c.rope.scaling)}
    return {
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.activation,
        "rms_norm_eps": c.norms.eps,
        "max_position_embeddings": c.context_length,
        "rope_theta": c.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope.theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": any(name.endswith("self_attn.q_proj.bias") for name in tensors),
        "tie_word_embeddings": False,
        "dtype": _DTYPES[tensors["fc.weight"].dtype],
    }


def _speculators(head: HeadFile, kind: str, architecture: str, proposed: int, tensors: Tensors) -> Raw:
    """Return the fields that all kinds share. See vllm-project/speculators, `config.py`."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": proposed,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": head.target, "architectures": []},
        },
        "tie_word_embeddings": False,
        "dtype": _DTYPES[tensors["fc.weight"].dtype],
    }


def _eagle3(head: HeadFile, c: EagleConfig, tensors: Tensors) -> Raw:
    """Return the fields of an EAGLE-3 head. See vllm-project/speculators, `models/eagle3/config.py`.

    If the head stores no embedding, vLLM uses the target's embedding. `speculators` 0.9 should do the same, but with
    transformers 5 it may use uninitialised memory instead. To continue a head's training there, store
    embed_tokens.weight.
    """
    _refuse({"EAGLE-1 and 2": c.version != 3, "P-EAGLE": c.mask_token is not None})
    _refuse({"windows": any(x.window for x in c.layer.plan)})
    return _speculators(head, "eagle3", "Eagle3Speculator", _DEFAULT_DRAFT_LENGTH, tensors) | {
        "transformer_layer_config": _layer_fields(c.layer, "qwen3" if c.layer.norms.heads else "llama", tensors),
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": None if c.target_hidden == c.layer.hidden else c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.taps) or None,
        "embed_requires_grad": False,
        **{flag: getattr(c, flag) for flag in EAGLE_FLAGS},
    }


def _dflash(head: HeadFile, c: BlockConfig, tensors: Tensors) -> Raw:
    """Return the fields of a DFlash head, which numbers taps by layer outputs.

    See z-lab/dflash, `dflash/model.py`. For windows and `causal`, see vLLM's `qwen3_dflash.py`.
    """
    default, causal = _causal(c)
    _refuse({"this choice of causal layers": causal != default and len(set(causal)) > 1})
    dflash: Raw = {"mask_token_id": c.mask_token, "target_layer_ids": [tap - 1 for tap in c.taps if tap != "final"]}
    dflash |= {name: getattr(c, field) for field, name in DFLASH2.items() if c.selector}
    return _block_fields(c, tensors) | {
        "architectures": ["DFlash2DraftModel" if c.selector else "DFlashDraftModel"],
        "block_size": c.size,
        "dflash_config": dflash if causal == default else dflash | {"causal": causal[0]},
        "num_target_layers": head.target_layers,
    }


def _speculators_dflash(head: HeadFile, c: BlockConfig, tensors: Tensors) -> Raw:
    """Return the fields of a block drafter. See vllm-project/speculators, `models/{dflash,dspark}/config.py`."""
    default, causal = _causal(c)
    _refuse({"this choice of causal layers": causal != default and any(causal)})
    _refuse({"a path selector in the layout of speculators": c.selector})
    kind, architecture = ("dspark", "DSparkSpeculator") if c.markov else ("dflash", "DFlashSpeculator")
    markov: Raw = {
        "markov_rank": c.markov,
        "markov_head_type": "vanilla",
        "enable_confidence_head": c.confidence > 0,
        "confidence_head_with_markov": c.confidence > c.layer.hidden,
    }
    return (
        _speculators(head, kind, architecture, c.depth, tensors)
        | (markov if c.markov else {})
        | {
            "transformer_layer_config": _block_fields(c, tensors),
            "draft_vocab_size": c.draft_vocab or c.layer.vocab_size,
            "block_size": c.size,
            "mask_token_id": c.mask_token,
            "aux_hidden_state_layer_ids": list(c.taps),
            "sliding_window_non_causal": causal != default,
            "sample_from_anchor": c.from_anchor,
        }
    )


def _causal(c: BlockConfig) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return two tuples with an entry for each layer: the default of `causal`, which both layouts share, and its value
    in this head."""
    return tuple(x.window is not None for x in c.layer.plan), c.causal or (False,) * c.layer.layers


def _block_fields(c: BlockConfig, tensors: Tensors) -> Raw:
    plan = c.layer.plan
    widths = {x.window for x in plan} - {None}
    ropes = any(x.rope != c.layer.rope for x in plan)
    _refuse({"the tap final": "final" in c.taps, "windows of several widths": len(widths) > 1})
    _refuse({"rotary embeddings by layer": ropes})
    fields = _layer_fields(replace(c.layer, special=()), "qwen3", tensors)
    if widths:
        types = [SLIDING if x.window else FULL for x in plan]
        fields |= {"use_sliding_window": True, "sliding_window": widths.pop(), "layer_types": types}
    return fields
