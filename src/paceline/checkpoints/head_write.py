"""Learned drafters, written in the layouts that other projects read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoints.head_check import check_tensors
from paceline.checkpoints.head_files import complete, holds_head
from paceline.errors import CannotWrite, InvalidOption
from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, HeadFile, MedusaConfig, kind_of

Raw = dict[str, Any]

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
_VERSION = "0.9.0"
"""Of the `speculators` layout that is written."""

_PROPOSED = 5
"""How many tokens a round other programs are told to draft, which they let their users change."""


@dataclass(frozen=True)
class Written:
    """A head in the terms of a layout: config.json, the file of its tensors, and these under that layout's names."""

    config: Raw
    tensors: Mapping[str, Tensor]
    file: str = "model.safetensors"


def write_head(folder: str | Path, head: HeadFile, layout: str | None = None) -> Path:
    """Write `head` (its `path` and `layout` do not matter) as a folder that `open_head` and that layout's project read.

    `layout`: see `LAYOUTS`, where each kind's first one is what None means. Tensors keep their dtypes. The folder
    appears whole or not at all; one that holds a head already is replaced. Raises `InvalidOption` for what a layout
    cannot say and for a folder that holds something else, `CorruptModel` for tensors that do not fit their config,
    `CannotWrite`.
    """
    folder, kind = Path(folder).expanduser(), kind_of(head.config)
    known = LAYOUTS.get(kind, {})
    layout = layout or next(iter(known), "")
    if layout not in known:
        raise InvalidOption(
            f"a head of kind {kind} has no layout {layout!r}", f"There are {', '.join(known) or 'none'}"
        )
    tensors = complete(head.config, head.tensors)
    check_tensors(folder, head.config, tensors)
    written = known[layout](head, tensors)
    own = {"kind": kind, "target": head.target, "target_layers": head.target_layers} | dict(head.extra)
    if isinstance(head.config, MedusaConfig) and head.config.paths:
        own["paths"] = [list(path) for path in head.config.paths]
    kept = {key: value for key, value in own.items() if value is not None}
    _replace(folder, Written(written.config | {"paceline": kept}, written.tensors, written.file))
    return folder


def check_folder(folder: Path) -> None:
    """Raises `InvalidOption` where something lies that is no head, which a head would replace."""
    if folder.exists() and not (holds_head(folder) or (folder.is_dir() and not any(folder.iterdir()))):
        raise InvalidOption(f"{folder} exists and holds no head", "Name a new folder")


def _replace(folder: Path, written: Written) -> None:
    check_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside: Any = {"dir": folder.parent, "prefix": f".{folder.name}."}
        with tempfile.TemporaryDirectory(**beside, ignore_cleanup_errors=True) as at:
            _fill(Path(at, "new"), written)
            _swap(folder, Path(at))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap what the disk says
        reason = (str(error) or type(error).__name__).splitlines()[0]
        cause = f"cannot write the head {folder} ({reason})"
        raise CannotWrite(cause, "Check free disk space and permissions") from error


def _swap(folder: Path, at: Path) -> None:
    """`at`/new becomes `folder`. If that fails, what was there before is there again."""
    if folder.exists():
        folder.rename(at / "old")
    try:
        (at / "new").rename(folder)
    except BaseException:
        if (at / "old").exists():
            (at / "old").rename(folder)
        raise


def _fill(folder: Path, written: Written) -> None:
    folder.mkdir()
    # Copies: safetensors refuses tensors that share memory, and torch would store all of it.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in written.tensors.items()}
    if written.file.endswith(".pt"):
        torch.save(tensors, folder / written.file)
    else:
        save_file(tensors, folder / written.file, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
    (folder / written.file).chmod(config.stat().st_mode)  # safetensors lets nobody but the owner read


def _refuse(layout: str, **reasons: object) -> None:
    if said := [name for name, there in reasons.items() if there]:
        raise InvalidOption(
            f"the layout {layout!r} has no word for {', '.join(said)}", "Write this head in its default layout"
        )


def _layer_terms(c: ModelConfig, family: str, tensors: Mapping[str, Tensor]) -> Raw:
    """A ModelConfig in Hugging Face's terms, both the older and transformers 5's spelling of rotary embeddings."""
    _refuse(family, windows=any(x.window for x in c.plan), **{"rotary factors of its own": c.rope.factors})
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
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.context_length,
        "rope_theta": c.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope.theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": any(name.endswith("self_attn.q_proj.bias") for name in tensors),
        "tie_word_embeddings": False,
        "dtype": _NAMES[next(t.dtype for t in tensors.values() if t.is_floating_point())],
    }


def _flags(c: EagleConfig) -> Raw:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(c, name) for name in names}


def _speculators(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See vllm-project/speculators, `models/eagle3/config.py`.

    vLLM borrows the target's embedding where the head stores none. `speculators` 0.9 means to do so too, but under
    transformers 5 it may keep what the memory held instead: a head for training on with it stores embed_tokens.weight.
    """
    c = head.config
    assert isinstance(c, EagleConfig)
    config = _speculators_terms(head, "eagle3", "Eagle3Speculator", _PROPOSED, tensors) | {
        "transformer_layer_config": _layer_terms(c.layer, "qwen3" if c.layer.qk_norm else "llama", tensors),
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": None if c.target_hidden == c.layer.hidden else c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.taps) or None,
        "embed_requires_grad": False,
        **_flags(c),
    }
    return Written(config, tensors)


def _speculators_terms(head: HeadFile, kind: str, name: str, proposed: int, tensors: Mapping[str, Tensor]) -> Raw:
    """What all kinds have in vllm-project/speculators, `config.py`."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": proposed,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": head.target, "architectures": []},
        },
        "tie_word_embeddings": False,
        "dtype": _NAMES[tensors["fc.weight"].dtype],
    }


def _sglang(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See sgl-project/SpecForge, `configs/` and `modeling/draft/llama3_eagle.py`."""
    c = head.config
    assert isinstance(c, EagleConfig)
    _refuse(
        "sglang",
        norm_before_residual=c.norm_before_residual,
        norm_before_fc=c.norm_before_fc,
        qk_norm=c.layer.qk_norm,
        **{"the tap 0": 0 in c.taps},
    )
    config = _layer_terms(c.layer, "llama", tensors) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
    }
    if c.taps:
        outputs = [tap - 1 for tap in c.taps if tap != "final"]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    if c.target_hidden != c.layer.hidden:
        config["target_hidden_size"] = c.target_hidden
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if "d2t" not in renamed:  # the model there has both maps always
        renamed |= {"d2t": torch.zeros(c.draft_vocab, dtype=torch.long), "t2d": torch.ones(c.draft_vocab) > 0}
    return Written(config, renamed)


def _medusa_reference(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See FasterDecoding/Medusa, `medusa/model/medusa_model.py`. Its blocks always have biases."""
    c = head.config
    assert isinstance(c, MedusaConfig)
    _refuse("reference", **{"a shared head": c.shared, "token_map": "token_map" in tensors})
    named: dict[str, Tensor] = {}
    for i in range(c.heads):
        for j in range(c.layers):
            weight = tensors[f"blocks.{i}.layers.{j}.weight"]
            named[f"{i}.{j}.linear.weight"] = weight
            named[f"{i}.{j}.linear.bias"] = tensors.get(f"blocks.{i}.layers.{j}.bias", torch.zeros_like(weight[0]))
        named[f"{i}.{c.layers}.weight"] = tensors[f"lm_heads.{i}.weight"]
    config = {
        "medusa_num_heads": c.heads,
        "medusa_num_layers": c.layers,
        "base_model_name_or_path": head.target,
        "hidden_size": c.hidden,
        "vocab_size": c.vocab_size,
    }
    return Written(config, named, "medusa_lm_head.pt")


def _vllm(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See vllm-project/vllm, `model_executor/models/medusa.py` and `transformers_utils/configs/medusa.py`."""
    c = head.config
    assert isinstance(c, MedusaConfig)
    _refuse("vllm", **{"a shared head": c.shared})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden,
        "vocab_size": c.vocab_size,
        "truncated_vocab_size": c.draft_vocab,
        "num_heads": c.heads,
        "num_hidden_layers": c.layers,
        "medusa_fc_bias": any(name.endswith(".bias") for name in tensors),
        "base_model_name_or_path": head.target,
    }
    return Written(config, _with_biases(c, tensors))


def _with_biases(c: MedusaConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for blocks without a bias beside others that have one: vLLM knows all or none."""
    blocks = [f"blocks.{i}.layers.{j}" for i in range(c.heads) for j in range(c.layers)]
    if not any(name.endswith(".bias") for name in tensors):
        return tensors
    return {f"{name}.bias": torch.zeros_like(tensors[f"{name}.weight"][0]) for name in blocks} | tensors


def _compact(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """Paceline's own: vLLM's names, without lm_heads where the target's is shared."""
    c = head.config
    assert isinstance(c, MedusaConfig)
    _refuse("paceline", **{"heads of its own": not c.shared})
    config = {
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
    return Written(config, tensors)


def _dflash(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See z-lab/dflash, `dflash/model.py`, which names the layers whose outputs it takes, and for windows and `causal`
    vLLM's `qwen3_dflash.py`."""
    c = head.config
    assert isinstance(c, BlockConfig)
    default, causal = _causal(c)
    _refuse(
        "reference",
        from_anchor=c.from_anchor,
        draft_vocab="lm_head.weight" in tensors,
        **{"the tap 0": 0 in c.taps, "the tap final": "final" in c.taps},
        **{"this choice of causal layers": causal != default and len(set(causal)) > 1},
    )
    outputs = [tap - 1 for tap in c.taps if tap != "final"]
    own: Raw = {"mask_token_id": c.mask_token, "target_layer_ids": outputs}
    config = _block_terms("reference", c.layer, tensors) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": c.size,
        "dflash_config": own if causal == default else own | {"causal": causal[0]},
        "num_target_layers": head.target_layers,
    }
    return Written(config, tensors)


def _speculators_dflash(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    """See vllm-project/speculators, `models/dflash/config.py`."""
    c = head.config
    assert isinstance(c, BlockConfig)
    default, causal = _causal(c)
    _refuse(
        "speculators",
        **{"the tap final": "final" in c.taps},
        **{"this choice of causal layers": causal != default and any(causal)},
    )
    config = _speculators_terms(head, "dflash", "DFlashSpeculator", c.depth, tensors) | {
        "transformer_layer_config": _block_terms("speculators", c.layer, tensors),
        "draft_vocab_size": c.draft_vocab or c.layer.vocab_size,
        "block_size": c.size,
        "mask_token_id": c.mask_token,
        "aux_hidden_state_layer_ids": list(c.taps),
        "sliding_window_non_causal": causal != default,
        "sample_from_anchor": c.from_anchor,
    }
    return Written(config, tensors)


def _causal(c: BlockConfig) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which layers are causal where a config says nothing, and which are."""
    return tuple(x.window is not None for x in c.layer.plan), c.causal or (False,) * c.layer.layers


def _block_terms(layout: str, c: ModelConfig, tensors: Mapping[str, Tensor]) -> Raw:
    widths = {x.window for x in c.plan} - {None}
    ropes = any(x.rope != c.rope for x in c.plan)
    _refuse(layout, **{"windows of several widths": len(widths) > 1, "rotary embeddings by layer": ropes})
    terms = _layer_terms(replace(c, special=()), "qwen3", tensors)
    types = ["sliding_attention" if x.window else "full_attention" for x in c.plan]
    return (
        terms | {"use_sliding_window": True, "sliding_window": widths.pop(), "layer_types": types} if widths else terms
    )


def _exit(head: HeadFile, tensors: dict[str, Tensor]) -> Written:
    c = head.config
    assert isinstance(c, ExitConfig)
    return Written({"paceline_kind": "exit", "hidden_size": c.hidden, "layers": c.layers, "rank": c.rank}, tensors)


LAYOUTS: dict[str, dict[str, Callable[[HeadFile, dict[str, Tensor]], Written]]] = {
    "eagle3": {"speculators": _speculators, "sglang": _sglang},
    "medusa": {"reference": _medusa_reference, "vllm": _vllm, "paceline": _compact},
    "block": {"reference": _dflash, "speculators": _speculators_dflash},
    "exit": {"paceline": _exit},
}
"""Kind -> the layouts it can be written in, the default first."""
