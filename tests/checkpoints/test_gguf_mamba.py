"""Mamba-2 and LFM2-MoE from GGUF files, laid out as llama.cpp's converter does it (`conversion/mamba.py`, `granite.py`,
`falcon_h1.py`, `nemotron.py`, `lfm2.py`), against transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints.families.falcon_h1 import multipliers
from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.model_config import read_config
from paceline.errors import UnsupportedModel
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import write_file
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text

Config = dict[str, Any]
ARCH = gguf.MODEL_ARCH


def sizes(c: Config, *names: str) -> dict[str, Any]:
    """Of the states; `names`: of the keys in config.json."""
    values = [c[name] for name in names]
    kernel, keys, groups, heads, size = values
    ssm = {"conv_kernel": kernel, "state_size": keys, "group_count": groups, "time_step_rank": heads}
    return {f"ssm.{key}": value for key, value in {**ssm, "inner_size": heads * size}.items()}


def attending(c: Config, layers: list[str]) -> list[int]:
    return [c["num_key_value_heads"] if "attention" in kind.removeprefix("linear") else 0 for kind in layers]


PREFIXED = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")


def mamba2(c: Config) -> Config:
    heads = {"attention.head_count": 0, "feed_forward_length": 0, "context_length": 2**20}
    return heads | sizes(c, "conv_kernel", "state_size", "n_groups", "num_heads", "head_dim")


def granite(c: Config) -> Config:
    kinds = ["" if one == "linear_attention" else "attention" for one in c["layer_types"]]
    scales = {"attention.scale": c["attention_multiplier"], "embedding_scale": c["embedding_multiplier"]}
    scales |= {"residual_scale": c["residual_multiplier"], "logit_scale": c["logits_scaling"]}
    experts = {"expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]}
    return {
        **{**scales, **sizes(c, *PREFIXED), "attention.head_count_kv": attending(c, kinds)},
        **(experts if c["num_local_experts"] else {}),
        "expert_shared_feed_forward_length": c["shared_intermediate_size"],
        "rope.scaling.finetuned": c["position_embedding_type"] == "rope",
        "attention.key_length": 16,
        "attention.value_length": 16,
    }


def falcon(c: Config) -> Config:
    heads = {"attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c["head_dim"]}
    return heads | {"attention.value_length": c["head_dim"]} | sizes(c, *PREFIXED)


def nemotron(c: Config) -> Config:
    kinds = c["layers_block_type"]
    width = c["moe_intermediate_size"] if "moe" in kinds else c["intermediate_size"]
    experts = {
        **{"expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"]},
        **{"expert_feed_forward_length": width, "expert_weights_norm": c["norm_topk_prob"]},
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_weights_scale": c["routed_scaling_factor"],
    }
    return {
        **sizes(c, "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
        "attention.head_count_kv": attending(c, ["attention" if x == "full_attention" else "" for x in kinds]),
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        **{"rope.scaling.finetuned": False, "attention.key_length": 16, "attention.value_length": 16},
        **(experts if "moe" in kinds else {}),
    }


def lfm2(c: Config) -> Config:
    return {
        "attention.head_count_kv": attending(c, ["" if kind == "conv" else "attention" for kind in c["layer_types"]]),
        **{"expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"]},
        **{"expert_feed_forward_length": c["moe_intermediate_size"], "shortconv.l_cache": c["conv_L_cache"]},
        "leading_dense_block_count": c["num_dense_layers"],
    }


CASES: dict[str, tuple[Any, Callable[[Config], Config]]] = {
    "mamba-2": (ARCH.MAMBA2, mamba2),
    "granite 4, experts, positions": (ARCH.GRANITE_HYBRID, granite),
    "falcon-h1": (ARCH.FALCON_H1, falcon),
    "falcon-h1, normed after its gate": (ARCH.FALCON_H1, falcon),
    "nemotron-h": (ARCH.NEMOTRON_H, nemotron),
    "nemotron-h, experts": (ARCH.NEMOTRON_H_MOE, nemotron),
    "lfm2 moe": (ARCH.LFM2MOE, lfm2),
}


def paired(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head in pairs, as LlamaModel's `permute` lays them out."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def laid_out(arch: Any, c: Config, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By the converter's names for transformers' ones, and in its shapes."""
    table, stacks = gguf.get_tensor_name_map(arch, 8), dict[str, dict[int, Tensor]]()
    for source, x in tensors.items():
        name = source.replace(".dt_bias", ".dt_proj.bias").replace("expert_bias", "expert_bias.bias")
        name = name.replace("correction_bias", "correction.bias")
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = x
            continue
        if arch == ARCH.GRANITE_HYBRID and ("q_proj" in name or "k_proj" in name):
            x = paired(x, c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if name.endswith(".A_log"):
            x = -x.exp()
        if name.endswith((".A_log", ".D")):
            x = x[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            x = x.view(c.get("n_groups") or c["mamba_n_groups"], -1)
        if name.endswith("input_linear.weight"):
            kind = "exps" if "sparse" in name else "shexp"
            for part, half in zip(("gate", "up"), x.chunk(2, -2), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_{kind}.weight", half
            continue
        yield table.get_name(name, (".weight", ".bias")), x.squeeze(1) if "conv" in name and x.ndim == 3 else x
    for name, parts in stacks.items():
        stacked = torch.stack([parts[i] for i in range(len(parts))])
        name = name.replace("backbone.", "model.").replace("mixer.", "mlp.")
        yield table.get_name(name.removeprefix("model.") if arch == ARCH.LFM2MOE else name, (".weight",)), stacked


def write(path: Path, arch: Any, c: Config, fields: Config, tensors: dict[str, Tensor]) -> None:
    name = gguf.MODEL_ARCH_NAMES[arch]
    fields = {
        **{"block_count": len(c.get("layers_block_type") or ()) or c["num_hidden_layers"], "context_length": 2048},
        **{"embedding_length": c["hidden_size"], "attention.head_count": c.get("num_attention_heads")},
        "feed_forward_length": c.get("intermediate_size"),
        **fields,
    }
    nemotron = "nemotron" in name
    fields["attention.layer_norm_epsilon" if nemotron else "attention.layer_norm_rms_epsilon"] = (
        c.get("norm_eps") or c.get("rms_norm_eps") or c["layer_norm_epsilon"]
    )
    if rope := c.get("rope_parameters"):
        fields["rope.freq_base"] = rope["rope_theta"]
    write_file(path, name, fields, laid_out(arch, c, tensors))


def saved(case: str, folder: Path) -> tuple[Any, Config, dict[str, Tensor]]:
    theirs, _ = models(case)
    theirs.save_pretrained(folder)
    c = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if c["model_type"] == "falcon_h1":  # the converter multiplies them
        factors = multipliers(c)
        for name, x in tensors.items():
            for end, rows in factors.items():
                if name.replace("feed_forward", "mlp").endswith(end):
                    each = torch.cat([torch.full((min(count, len(x)),), f) for count, f in rows])[: len(x)]
                    tensors[name] = x * each.view(-1, *(1,) * (x.ndim - 1))
        tensors["lm_head.weight"] *= c["lm_head_multiplier"]
        tensors["model.embed_tokens.weight"] *= c["embedding_multiplier"]
    return theirs, c, tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    arch, fields = CASES[case]
    theirs, c, tensors = saved(case, tmp_path)
    write(tmp_path / "m.gguf", arch, c, fields(c), tensors)
    config, found, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), found, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mamba2", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ("mamba2", {"hidden_act": "gelu"}, "gelu"),
        ("nemotron_h", {"layers_block_type": ["moe"], "n_group": 2}, "grouped"),
        ("nemotron_h", {"layers_block_type": ["mlp"], "mlp_hidden_act": "silu"}, "relu2"),
    ],
)
def test_variants_that_compute_otherwise_are_refused(kind: str, changes: Config, said: str) -> None:
    raw = {"model_type": kind, "hidden_size": 8, "vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(UnsupportedModel, match=said):
        read_config(raw | {"intermediate_size": 8} | changes)
