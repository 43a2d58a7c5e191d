"""Every family against transformers on tiny random models, read back from disk: plainly, in drafts, past windows."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoints.expert_tensors import ExpertTensors
from paceline.drafters.model import DraftModel
from paceline.engine.self_check import guarantee
from paceline.kernels.linear import gated, linear, packs_bfloat16
from paceline.models.config import Groups
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from paceline.models.layers import Dense, Mixture
from paceline.models.tensor_names import translated
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix
from tests.support.trees import path_to

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
VOCAB = 101

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 5.0, 12.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS: dict[str, Any] = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}
LLAMA4: dict[str, Any] = {
    **{"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 80, "num_local_experts": 5},
    **{"attention_chunk_size": 4096, "floor_scale": 7},
}
SLIDES = {"use_sliding_window": True, "sliding_window": 20}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_key_value_heads": 6, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
}
GROUPS = {"n_group": 4, "topk_group": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases, sliding upper layers": (
        "Qwen3",
        {"head_dim": 8, "attention_bias": True, "max_window_layers": 2, **SLIDES},
    ),
    "mistral, sliding": ("Mistral", {"sliding_window": 24}),
    "qwen2, sliding upper layers": ("Qwen2", {"max_window_layers": 1, **SLIDES}),
    "qwen2": ("Qwen2", {}),
    "phi3, sliding": ("Phi3", {"sliding_window": 17}),
    "phi3, partial, short factors": (
        "Phi3",
        {
            "head_dim": 12,
            "num_attention_heads": 4,
            "partial_rotary_factor": 0.7,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 1800,
        },
    ),
    "phi3, long factors": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 30}),
    "smollm3": ("SmolLM3", {"mlp_bias": True, "attention_bias": True, "no_rope_layer_interval": 2}),
    "smollm3, sliding": ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1], **SLIDES}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0},
    ),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3, stretched": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19}),
    "qwen3 moe": ("Qwen3Moe", {"norm_topk_prob": True, **EXPERTS}),
    "qwen3 moe, some layers dense": ("Qwen3Moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], **EXPERTS}),
    "qwen3 moe, sliding": ("Qwen3Moe", {"mlp_only_layers": [0], **SLIDES, **EXPERTS}),
    "gpt-oss": ("GptOss", {**GPT_OSS, "sliding_window": 18}),
    "gpt-oss, other layers slide": (
        "GptOss",
        {**GPT_OSS, "sliding_window": 21, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
    ),
    "ministral, sliding": (
        "Ministral",
        {
            **{"head_dim": 8, "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
            **{"logits_scaling": 2.5, "attention_bias": True},
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3, sliding": ("Olmo3", {"sliding_window": 18}),
    "olmo3, sliding, stretched": (
        "Olmo3",
        {
            "sliding_window": 18,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": None, "head_dim": 16, "layer_types": ["full_attention"] * 4}),
    "exaone4, sliding": ("Exaone4", {"sliding_window": 18, "sliding_window_pattern": 2, "head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4.5": (
        "Glm4Moe",
        {
            **{"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.7,
                "use_qk_norm": True,
                "attention_bias": True,
            },
        },
    ),
    "glm4.5 without groups": (
        "Glm4Moe",
        {
            **{"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False},
        },
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}),
    "llama4 as published": (
        "Llama4Text",
        {
            **{**LLAMA4, "attention_chunk_size": 8192, "floor_scale": 8192},
            "rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
    ),
    "llama4, sliding": (
        "Llama4Text",
        {
            **{**LLAMA4, "attention_chunk_size": 20, "no_rope_layers": [1, 0, 1, 1], "num_experts_per_tok": 2},
            "rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "llama4 without experts": (
        "Llama4Text",
        {
            **{**LLAMA4, **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step"), 0)},
            **{"moe_layers": [], "no_rope_layers": [1] * 4, "layer_types": ["full_attention"] * 4},
        },
    ),
    "llama4, dense": ("Llama4Text", {**LLAMA4, "moe_layers": [], "use_qk_norm": False, "attn_scale": 0.5}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "deepseek v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "deepseek v2, no query latent, groups, stretched": (
        "DeepseekV2",
        {
            **{**LATENT, **GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v3": ("DeepseekV3", {**LATENT, **GROUPS, "attention_bias": True}),
    "deepseek v3, halves, stretched": (
        "DeepseekV3",
        {
            **{**LATENT, **GROUPS, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.3},
        },
    ),
    "glm 4.7 flash": ("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere, norms of heads": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True}),
    "cohere2, sliding": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 18}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2, sliding": ("Starcoder2", {"sliding_window": 21, "use_bias": False}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "phi": ("Phi", {"hidden_size": 96, "num_attention_heads": 4}),
    "phi, norms of heads": ("Phi", {"qk_layernorm": True}),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 96, "num_attention_heads": 4, "rotary_pct": 0.5}),
    "gpt-neox, one after the other": ("GPTNeoX", {"rotary_pct": 0.75, "use_parallel_residual": False}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn, own temperature": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, "beta_fast": 16.0}},
    ),
    "longrope": (
        "Llama",
        {"rope_parameters": LONGROPE | {"factor": 3.0, "original_max_position_embeddings": 40, "rope_theta": 5e3}},
    ),
}
WINDOWED = [case for case in CASES if "sliding" in case or case.startswith(("gemma", "mixtral", "gpt-oss"))]


@cache
def models(case: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Decoder]:
    """transformers' model, and ours from what it saves."""
    name, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**deepcopy(SIZES | changes))
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for key, parameter in theirs.named_parameters():  # transformers starts biases at zero and norms at 0 or 1
        if parameter.dim() == 1 or "_norm." in key:
            torch.nn.init.normal_(parameter, float("Gemma" not in name or "norm" not in key), 0.3)
        elif key.endswith("_bias"):  # of gpt-oss's experts, beyond what its SwiGLU clamps
            torch.nn.init.normal_(parameter, 0.0, 4.0)
    for key, buffer in theirs.named_buffers():
        if key.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    theirs = theirs.to(dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config = read_config(json.loads((Path(folder) / "config.json").read_text()))
        tensors = translated({"model_type": config.family}, load_file(Path(folder) / "model.safetensors"))
        return theirs, Decoder(config, ExpertTensors(tensors) if name == "GptOss" else tensors, dtype, CPU)


def text(length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def feed(target: Decoder, cache: KVCache, slot: int, tokens: list[int]) -> torch.Tensor:
    """A committed chunk: its logits [T, V]."""
    rows = pack_prefix(tokens, slot, cache.lengths[slot], CPU)
    out = target.forward(rows, cache, Want())
    cache.commit(rows, [range(1, len(tokens))])
    return out.logits[0, : len(tokens)]


def verify(target: Decoder, cache: KVCache, slot: int, last: int, draft: Draft) -> torch.Tensor:
    rows = pack([last], [draft], [slot], [cache.lengths[slot]], CPU)
    return target.forward(rows, cache, Want()).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # transformers' norms (Gemma 2's softmax, the states of hybrids) are in float32 even here.
    assert float((ours - theirs).norm() / theirs.norm()) < 3e-5


def check_chunks(theirs: Any, ours: Decoder, length: int, cuts: Sequence[int]) -> None:
    """Logits of a text fed in chunks that end at `cuts`, then token by token, are those of transformers."""
    tokens, cache = text(length), ours.new_cache()
    slot = cache.acquire(length)
    logits = [feed(ours, cache, slot, tokens[a:b]) for a, b in itertools.pairwise((0, *cuts))]
    for token in tokens[cuts[-1] :]:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], CPU)
        logits.append(ours.forward(rows, cache, Want()).logits[0, :1])
        cache.commit(rows, [()])
    assert_close(torch.cat(logits), expected(theirs, tokens))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    check_chunks(*models(case), 70, (33, 35, 55))


TREE = Draft((7, 8, 9, 10, 11, 12, 7, 8), (0, 0, 1, 1, 2, 3, 4, 6))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [47, 48])
def test_a_drafted_nodes_logits_are_those_of_its_path(case: str, length: int) -> None:
    theirs, ours = models(case)
    tokens = text(length)
    cache = ours.new_cache()
    slot = cache.acquire(length)
    feed(ours, cache, slot, tokens)
    check_drafts(theirs, ours, cache, slot, tokens, rows=(2, 5, 7, 8))


def check_drafts(
    theirs: Any, ours: Decoder, cache: KVCache, slot: int, tokens: list[int], rows: tuple[int, ...]
) -> None:
    """These nodes of a tree, then a chain on top of a committed branch of it."""
    whole = pack([5], [TREE], [slot], [cache.lengths[slot]], CPU)
    logits = ours.forward(whole, cache, Want()).logits[0]
    for row in rows:
        path = path_to(TREE, row)[::-1]
        assert_close(logits[row], expected(theirs, [*tokens, 5, *(TREE.tokens[r - 1] for r in path[1:])])[-1])
    path = path_to(TREE, 8)[::-1][1:]
    cache.commit(whole, [path])
    tokens = [*tokens, 5, *(TREE.tokens[r - 1] for r in path)]
    logits = verify(ours, cache, slot, 6, Draft.chain([1, 2, 3, 4, 5]))
    assert_close(logits[:6], expected(theirs, [*tokens, 6, 1, 2, 3, 4, 5])[-6:])


@pytest.mark.parametrize("case", WINDOWED)
def test_windows_hold_over_a_ring_that_has_wrapped(case: str) -> None:
    theirs, ours = models(case)
    tokens = text(1110)
    cache = ours.new_cache()
    slot = cache.acquire()
    parts = [feed(ours, cache, slot, tokens[start : start + PREFILL_ROWS]) for start in range(0, 1110, PREFILL_ROWS)]
    assert_close(torch.cat(parts), expected(theirs, tokens))
    check_drafts(theirs, ours, cache, slot, tokens, rows=(8,))


@pytest.mark.parametrize(
    "case",
    [
        *("gemma3", "mixtral", "qwen3 moe", "gpt-oss", "phi3, sliding", "phi3, long factors"),
        *("cohere2, sliding", "starcoder2", "stablelm, parallel", "phi", "gpt-neox", "glm4.5", "llama4, sliding"),
    ],
)
def test_text_with_drafts_is_what_transformers_generates(case: str) -> None:
    theirs, ours = models(case)
    prompt = text(34)
    whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
    for shape in (DraftBudget.chain(4), DraftBudget(9, 4, 3)):
        drafter = Oracle(whole, 0.7, VOCAB)
        assert run(ours, prompt, Sampling(max_new_tokens=40), drafter, shape)[0] == whole[34:]


def test_a_draft_model_keeps_to_the_factors_of_its_request() -> None:
    ours = models("phi3, long factors")[1]
    stats = run(ours, text(34), Sampling(max_new_tokens=30), DraftModel(ours, VOCAB), DraftBudget.chain(3))[2]
    assert stats.acceptance == 1.0, "it drafts for itself"


def test_a_text_keeps_the_factors_that_its_prompt_chose() -> None:
    ours = models("phi3, long factors")[1]
    tokens = text(40)
    logits = {}
    for prompt in (30, 31):
        cache = ours.new_cache()
        first = cache.acquire(prompt)
        feed(ours, cache, first, tokens[:20])
        for slot in (first, cache.fork(first)):
            logits[prompt, slot] = feed(ours, cache, slot, tokens[20:])
    assert torch.equal(logits[30, 0], logits[30, 1]), "a fork goes on with them"
    assert torch.equal(logits[31, 0], logits[31, 1])
    assert not torch.allclose(logits[30, 0][:5], logits[31, 0][:5]), "another prompt, another choice"
    assert_close(logits[31, 0], expected(models("phi3, long factors")[0], tokens)[20:])
    cache.release(first)
    assert cache.prompts[cache.acquire()] == 0


def test_dynamic_scaling_follows_the_prompt() -> None:
    changes = {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 40}
    CASES["dynamic"] = ("Llama", changes)
    try:
        theirs, ours = models("dynamic")
    finally:
        del CASES["dynamic"]
    assert ours.context_length == 120
    for length in (70, 90, 39):  # transformers keeps the base of the longest text it has seen, and resets below 40
        tokens = text(length)
        cache = ours.new_cache()
        slot = cache.acquire(length)
        logits = torch.cat([feed(ours, cache, slot, tokens[:20]), feed(ours, cache, slot, tokens[20:])])
        assert_close(logits, expected(theirs, tokens))


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "mistral, sliding", "qwen2, sliding upper layers"])
def test_the_cache_holds_what_the_config_says(case: str) -> None:
    _, ours = models(case)
    cache = ours.new_cache()
    slot = cache.acquire()
    for length in (256, 512, 1024):  # where no step is half used
        while cache.lengths[slot] < length:
            feed(ours, cache, slot, [1] * PREFILL_ROWS)
        assert ours.config.cache_bytes(length, itemsize=8) == cache.nbytes


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "gemma3", "phi3, sliding"])
def test_bfloat16_rounds_no_worse_than_transformers(case: str) -> None:
    theirs, ours = models(case, torch.bfloat16)
    tokens = text(60)
    truth = expected(models(case)[0], tokens)
    cache = ours.new_cache()
    mine = feed(ours, cache, cache.acquire(), tokens)
    assert (mine - truth).norm() < 1.05 * (expected(theirs, tokens) - truth).norm()


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_keeps_bits_whatever_travels_along(case: str) -> None:
    assert guarantee(models(case, torch.bfloat16)[1]) == "bits"


class Watched(Dense):
    """An expert that remembers how many rows its products had."""

    def __init__(self, number: int, seen: list[tuple[int, int]]) -> None:
        make = torch.Generator().manual_seed(number)
        gate, up = (torch.randn(8, 6, generator=make) for _ in range(2))
        super().__init__(gated(torch.cat([gate, up]), None, "silu"), linear(torch.randn(6, 8, generator=make)))
        self.number, self.seen = number, seen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.number, len(x)))
        return super().__call__(x)


def mixture(router: torch.Tensor) -> tuple[Mixture, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    return Mixture(linear(router), [Watched(i, seen) for i in range(5)], used=2, normalised=False), seen


def test_an_expert_never_multiplies_fewer_than_four_rows() -> None:
    experts, seen = mixture(torch.randn(5, 6, generator=torch.Generator().manual_seed(9)))
    x = torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(3))
    whole = experts(x)
    assert min(rows for _, rows in seen) == 4
    for row in range(7):  # alone, three rows of padding and all
        torch.testing.assert_close(experts(x[:, row : row + 1])[0, 0], whole[0, row])


def test_experts_of_equal_score_are_taken_in_order() -> None:
    experts, seen = mixture(torch.zeros(5, 6))
    experts(torch.ones(1, 4, 6))
    assert [number for number, _ in seen] == [0, 1]


@pytest.mark.parametrize(("best", "chosen"), [(2, [4, 5]), (1, [0, 1])])
def test_experts_of_the_best_groups_alone(best: int, chosen: list[int]) -> None:
    """By the two highest scores of each (DeepSeek-V3) or the highest (V2). Of equal ones the first."""
    logits = torch.tensor([[3.0], [-2.0], [0.0], [0.0], [2.0], [1.9], [2.0], [1.9]])
    one = Mixture(linear(logits), [], 2, False, sigmoid=True, groups=Groups(4, 1, best))
    assert one._route(torch.ones(3, 1))[1].tolist() == [chosen] * 3
