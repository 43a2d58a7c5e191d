"""Every GGUF architecture: a random model in the layout of llama.cpp's converter is read back unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoints.gguf import open_gguf
from tests.support.gguf_writing import config_fields, rope_scaling_fields, rope_tensors, write_file
from tests.support.lazy import transformers

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 9.5],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
GLOBAL_8 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama with its rope": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "mistral": ("llama", "MistralConfig", {"sliding_window": 8, "head_dim": 8}),
    "mixtral": ("llama", "MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}),
    "granite": (
        "granite",
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "arcee": ("arcee", "ArceeConfig", {"tie_word_embeddings": True}),
    "olmoe": ("olmoe", "OlmoeConfig", {"num_experts": 3, "num_experts_per_tok": 2}),
    "gemma": ("gemma", "GemmaConfig", {"head_dim": 16}),
    "seed_oss": ("seed_oss", "SeedOssConfig", {"head_dim": 16, "attention_bias": True}),
    "smollm3": ("smollm3", "SmolLM3Config", {"num_hidden_layers": 5}),
    "qwen2": ("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 128}),
    "qwen3 with yarn": ("qwen3", "Qwen3Config", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("phi3", "Phi3Config", {"sliding_window": 8, "original_max_position_embeddings": 64}),
    "phi4-mini": (
        "phi3",
        "Phi3Config",
        {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE, "tie_word_embeddings": True},
    ),
    "gemma2": ("gemma2", "Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma2 27B": (
        "gemma2",
        "Gemma2Config",
        {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8, "final_logit_softcapping": 25.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "gemma3 4B": (
        "gemma3",
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "rope_parameters": GLOBAL_8},
    ),
}
# Cases that transformers' own GGUF code loads as the same model. (It reads Mistral as Llama, ignores rope scaling,
# and does not support Mixtral or SmolLM3.)
WITNESSED = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "qwen3moe")


def random_model(kind: str, options: dict[str, Any]) -> Any:
    """Return a random model, with random norms and biases, because an exchange of equal values would be invisible."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, -0.5, 0.5) if "bias" in name else torch.nn.init.normal_(weight, 1.0, 0.3)
    return model


def convert(path: Path, arch: str, config: Any, tensors: dict[str, Tensor]) -> None:
    """Write a model in the layout of convert_hf_to_gguf.py."""
    write_file(path, arch, fields_of(arch, config), gguf_tensors(arch, config, tensors))


def fields_of(arch: str, c: Any) -> dict[str, Any]:
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    words = {"model": "gpt2", "tokens": [f"t{i}" for i in range(c.vocab_size)]}
    words |= {f"{role}_token_id": getattr(c, f"{role}_token_id") for role in ("bos", "eos")}
    words["padding_token_id"] = c.pad_token_id
    fields = config_fields(c) | rope_scaling_fields(rope) | {f"tokenizer.ggml.{key}": x for key, x in words.items()}
    if arch == "granite":
        fields |= {"attention.scale": c.attention_multiplier, "embedding_scale": c.embedding_multiplier}
        fields |= {"residual_scale": c.residual_multiplier, "logit_scale": c.logits_scaling}
    if arch in ("llama", "smollm3"):
        head_dim = getattr(c, "head_dim", None)
        fields["rope.dimension_count"] = head_dim or c.hidden_size // c.num_attention_heads
    if arch == "phi3":
        fields["rope.scaling.original_context_length"] = c.original_max_position_embeddings
        fields["rope.dimension_count"] = int(rope["partial_rotary_factor"] * c.hidden_size) // c.num_attention_heads
        fields["attention.sliding_window"] = c.sliding_window or 0
    elif arch in ("gemma2", "gemma3") or c.model_type == "mistral":
        fields["attention.sliding_window"] = c.sliding_window
    if arch == "gemma2":
        fields["attn_logit_softcapping"] = c.attn_logit_softcapping
        fields["final_logit_softcapping"] = c.final_logit_softcapping
    if experts := getattr(c, "num_local_experts", None):
        fields |= {"expert_count": experts, "expert_used_count": c.num_experts_per_tok}
    if arch == "qwen3moe":
        fields["expert_feed_forward_length"] = c.moe_intermediate_size
    return fields


def gguf_tensors(arch: str, config: Any, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors with the gguf library's names, interleaved query and key rows, stacked experts, norms plus 1."""
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        if re.search(r"experts\.\d+\.", name):
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch in ("llama", "smollm3", "granite", "arcee") and heads:
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if "gemma" in arch and name.endswith("norm.weight"):
            tensor = tensor + 1
        yield table.get_name(name, (".weight", ".bias")), tensor
    for name, parts in stacks.items():
        yield table.get_name(name, (".weight",)), torch.stack(parts)
    yield from rope_tensors(config)


Store = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return case -> its model, and the folder that contains its model.gguf."""

    @cache
    def stored(case: str) -> tuple[Any, Path]:
        arch, kind, options = CASES[case]
        folder = tmp_path_factory.mktemp(case.replace(" ", "_"))
        model = random_model(kind, options)
        model.save_pretrained(folder)
        convert(folder / "model.gguf", arch, model.config, load_file(folder / "model.safetensors"))
        return model, folder

    return stored


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Gemma's norms come back as (w + 1) - 1, which rounds.
        assert torch.allclose(ours[name], tensor, rtol=0, atol=3e-7 if "norm" in name else 0), name


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back(store: Store, case: str) -> None:
    _, folder = store(case)
    assert_same(dict(open_gguf(folder / "model.gguf")[1]), load_file(folder / "model.safetensors"))


# Fields that do not belong to the model, or that a GGUF does not distinguish.
NOT_COMPARED = {
    *("architectures", "dtype", "pad_token_id", "initializer_range", "transformers_version", "eos_token_id"),
    *("_name_or_path", "router_aux_loss_coef", "router_jitter_noise", "use_bidirectional_attention"),
    *("attention_bias", "hidden_act", "rope_freqs", "max_window_layers", "head_dim"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_config_means_the_same_to_transformers(store: Store, case: str) -> None:
    model, folder = store(case)
    raw = dict(open_gguf(folder / "model.gguf")[0])
    assert raw["eos_token_id"] == [2]
    assert raw["head_dim"] == (model.config.to_dict().get("head_dim") or 8)
    ours = transformers.AutoConfig.for_model(**raw).to_dict()
    theirs = model.config.to_dict()
    if case == "llama with its rope":  # comes as divisors per frequency
        assert raw["rope_freqs"] == pytest.approx(dict(rope_tensors(model.config))["rope_freqs.weight"].tolist())
        ours["rope_parameters"] = theirs["rope_parameters"]
    different = {key for key in theirs if ours.get(key) != theirs[key]} - NOT_COMPARED
    assert not different, {key: (ours.get(key), theirs[key]) for key in different}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_made_of_it_is_the_same_model(store: Store, case: str, tmp_path: Path) -> None:
    model, folder = store(case)
    config, tensors, _ = open_gguf(folder / "model.gguf")
    if case == "llama with its rope":
        config["rope_scaling"] = LLAMA3
    # Families have defaults for it, beyond this vocabulary.
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.randint(0, 48, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=2e-5)


@pytest.mark.parametrize("case", WITNESSED)
def test_transformers_reads_the_same_tensors_from_the_file(store: Store, case: str) -> None:
    """This shows that the file has the standard layout, and not only one on which both halves of this test agree."""
    model, folder = store(case)
    witness = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    assert_same(witness.state_dict(), model.state_dict())
