"""Unmerged adapters written by PEFT: logits equal PEFT's, sums are correct, and unsupported adapters are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paceline
from paceline.checkpoints.adapters import MAX_ADAPTERS, Adapter, check_adapters, read_factors
from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.lora import LoraAdapter, merge
from paceline.checkpoints.model_config import read_config
from paceline.drafters.model import DraftModel
from paceline.errors import InvalidOption, PacelineError, UnsupportedModel
from paceline.kernels.low_rank import Factors
from paceline.models.decoder import Decoder
from paceline.types import Want
from paceline.verify.tree import pack_prefix
from tests.support.lazy import peft, transformers
from tests.support.lora_training import ATTENTION, SIZES, VARIANTS, base_model, save_tokenizer, train
from tests.support.toys import toy_tokenizer

CPU = torch.device("cpu")
TOKENS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
BESIDE = ("a list of modules", "all linear, rank-stabilised", "a regex with patterns")


def logits(tensors: Any, config: dict[str, Any], adapters: list[Factors], number: int) -> Tensor:
    model = Decoder(read_config(config), tensors, torch.float64, CPU, adapters=adapters)
    cache = model.new_cache()
    rows = pack_prefix(TOKENS, cache.acquire(0, number), 0, CPU)
    return model.forward(rows, cache, Want()).logits[0, : len(TOKENS)]


@pytest.mark.parametrize("variant", BESIDE)
def test_logits_equal_the_merged_model(tmp_path: Path, variant: str) -> None:
    adapted = train(base_model(tmp_path / "base"), tmp_path / "lora", **VARIANTS[variant])
    base = open_checkpoint(tmp_path / "base")
    ours = logits(base.tensors, base.config, [read_factors("lora", Adapter(tmp_path / "lora"), base.config)], 1)
    together = merge(base, tmp_path / "lora")
    torch.testing.assert_close(ours, logits(together.tensors, base.config, [], 0), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        theirs = adapted.double()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_modules_of_renamed_families_are_found(tmp_path: Path) -> None:
    """LFM2 uses its own names in the adapter's file and in its patterns."""
    torch.manual_seed(0)
    sizes = SIZES | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    adapted = train(
        model,
        tmp_path / "lora",
        target_modules=["in_proj", "out_proj", "q_proj", "w1", "w2"],
        rank_pattern={"feed_forward.w1": 3},
    )
    base = open_checkpoint(tmp_path / "base")
    together = merge(base, tmp_path / "lora")
    merged = logits(together.tensors, together.config, [], 0)
    factors = read_factors("lora", Adapter(tmp_path / "lora"), base.config)
    torch.testing.assert_close(logits(base.tensors, base.config, [factors], 1), merged, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        theirs = adapted.double()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(merged, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "module", "said"),
    [
        ({"model_type": "falcon_h1"}, "self_attn.q_proj", "multipliers"),
        ({"model_type": "qwen3_5_text", "linear_heads_tiled": True}, "linear_attn.out_proj", "in another order"),
    ],
)
def test_changes_of_weights_that_are_not_the_files_are_refused(
    tmp_path: Path, base: dict[str, Any], module: str, said: str
) -> None:
    train(base_model(tmp_path / "base"), tmp_path / "lora", target_modules=["q_proj"])
    path = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({key.replace("self_attn.q_proj", module): x for key, x in load_file(path).items()}, path)
    with pytest.raises(UnsupportedModel, match=said):
        read_factors("x", Adapter(tmp_path / "lora"), base)
    other = open_checkpoint(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match=said):
        merge(replace(other, config=other.config | base), tmp_path / "lora")
    LoraAdapter(tmp_path / "lora", {"model_type": "qwen3_5_text"})


def test_several_are_added_up_by_their_weights(tmp_path: Path) -> None:
    model = base_model(tmp_path / "base")
    train(model, tmp_path / "one", target_modules=ATTENTION, r=4, lora_alpha=10)
    train(model, tmp_path / "two", target_modules=["q_proj", "down_proj"], r=3)
    base = open_checkpoint(tmp_path / "base")
    tensors = {name: base.tensors[name].double() for name in base.tensors}
    for path, weight in (("one", 0.75), ("two", -0.5)):
        merged = merge(base, tmp_path / path).tensors
        tensors = {name: x + weight * (merged[name] - base.tensors[name]) for name, x in tensors.items()}
    mixed = read_factors("mix", Adapter([tmp_path / "one", tmp_path / "two"], [0.75, -0.5]), base.config)
    ours = logits(base.tensors, base.config, [mixed], 1)
    torch.testing.assert_close(ours, logits(tensors, base.config, [], 0), rtol=1e-5, atol=1e-5)
    (a, b), (c, _) = (mixed.factors[f"model.layers.0.{x}"] for x in ("self_attn.q_proj", "mlp.down_proj"))
    assert (a.shape, b.shape, c.shape) == ((7, 16), (16, 7), (3, 24))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in BESIDE])
def test_adapters_that_can_only_be_merged_are_refused(tmp_path: Path, variant: str) -> None:
    train(base_model(tmp_path / "base"), tmp_path / "lora", **VARIANTS[variant])
    with pytest.raises(UnsupportedModel, match="must be the same for all rows of a pass") as caught:
        paceline.load(tmp_path / "base", adapters={"x": tmp_path / "lora"}, dtype="float32")
    assert "give it as `adapter`" in caught.value.fix


def test_x_lora_is_refused_with_its_reason(tmp_path: Path) -> None:
    train(base_model(tmp_path / "base"), tmp_path / "lora", target_modules=ATTENTION, r=4)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "XLORA"}))
    with pytest.raises(UnsupportedModel, match="X-LoRA, which weights its adapters for every token"):
        paceline.load(tmp_path / "base", adapters={"x": tmp_path / "lora"})


def test_bounds(tmp_path: Path) -> None:
    train(base_model(tmp_path / "base"), tmp_path / "lora", target_modules=["q_proj"], r=200)
    with pytest.raises(UnsupportedModel, match=r"has rank 600 at .*q_proj, more than 512"):
        read_factors("x", Adapter([tmp_path / "lora"] * 3), {})
    with pytest.raises(InvalidOption, match=f"there are {MAX_ADAPTERS + 1} adapters"):
        check_adapters({str(i): "x" for i in range(MAX_ADAPTERS + 1)})
    with pytest.raises(InvalidOption, match="is not a LoRA adapter"):
        read_factors("x", Adapter(tmp_path / "base"), {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Adapter([]), "names no adapter"),
        (lambda: Adapter(["a", 3]), "names no adapter"),  # type: ignore[list-item]
        (lambda: Adapter("a", [1.0, 2.0]), "for 1 adapters"),
        (lambda: Adapter("a", [float("nan")]), "for 1 adapters"),
        (lambda: Adapter("a", drafter="found"), "chooses a drafter for the model"),
        (lambda: check_adapters({" ": "a"}), "is called"),
    ],
)
def test_malformed_adapters(wrong: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        wrong()


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_replies_name_their_adapter(tmp_path: Path, quantize: Any) -> None:
    model = base_model(tmp_path / "base")
    train(model, tmp_path / "one", target_modules=ATTENTION, r=4, lora_alpha=10)
    train(model, tmp_path / "two", target_modules="all-linear", r=6, use_rslora=True)
    mix = Adapter([tmp_path / "one", tmp_path / "two"], [0.5, 0.5], drafter="ngram")
    llm = paceline.load(
        tmp_path / "base", adapters={"one": tmp_path / "one", "two": tmp_path / "two", "mix": mix}, quantize=quantize
    )
    names = [None, "one", "two", "mix"]
    batch = llm.generate([TOKENS] * 4, adapter=names, max_new_tokens=24, ignore_eos=True)
    assert len({tuple(reply.token_ids) for reply in batch}) == 4
    for name, reply in zip(names, batch, strict=True):
        alone = llm.generate(TOKENS, adapter=name, max_new_tokens=24, ignore_eos=True)
        assert alone.token_ids == reply.token_ids
        assert (reply.stats.adapter, reply.stats.drafter) == (name, "ngram" if name == "mix" else "suffix")
    some = {"adapters": {"one": tmp_path / "one"}, "device_map": "cpu"}
    placed = paceline.load(tmp_path / "base", quantize=quantize, **some)  # type: ignore[arg-type]
    assert placed.generate(TOKENS, adapter="one", max_new_tokens=24, ignore_eos=True).token_ids == batch[1].token_ids
    plain = paceline.load(tmp_path / "base", quantize=quantize, drafter=None)
    assert plain.generate(TOKENS, max_new_tokens=24, ignore_eos=True).token_ids == batch[0].token_ids
    with pytest.raises(InvalidOption, match="no adapter 'three' is loaded"):
        llm.generate(TOKENS, adapter="three")
    with pytest.raises(InvalidOption, match=r"adapters \(1\) is not the number of prompts \(2\)"):
        llm.generate([TOKENS] * 2, adapter=["one"])
    with pytest.raises(PacelineError, match="a model with adapters cannot be recorded"):
        llm.record(tmp_path / "recording.jsonl")


def gpt2(seed: int = 0) -> Any:
    """Return a tiny GPT-2, which transformers runs."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = transformers.GPT2Config(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config).double().eval()


def peft_model(**options: Any) -> Any:
    """Return a model with two adapters. The first one is active."""
    plain: dict[str, Any] = {"target_modules": ["c_attn", "c_fc"], "r": 4, "lora_alpha": 30}
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(**plain | options), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**plain | options | {"target_modules": ["c_proj"]}))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return model.double().eval()


def test_a_peft_model_runs_through_transformers() -> None:
    # The same model as a drafter, which has no adapters.
    from paceline.models.transformers import CausalLM

    drafter = DraftModel(CausalLM(gpt2()), 37)
    llm = paceline.load(peft_model(), tokenizer=toy_tokenizer(), drafter=drafter, draft=3)
    names = [None, "one", "two"]
    replies = llm.generate([TOKENS] * 3, adapter=names, max_new_tokens=24, ignore_eos=True)
    merged = {}
    for name in ("one", "two"):
        model = peft_model()
        model.set_adapter(name)
        own = paceline.load(model.merge_and_unload(), tokenizer=toy_tokenizer(), drafter=None)
        merged[name] = own.generate(TOKENS, max_new_tokens=24, ignore_eos=True).token_ids
    assert [reply.token_ids for reply in replies] == [merged["one"], merged["one"], merged["two"]]
    assert merged["one"] != merged["two"]
    assert all(reply.stats.drafted for reply in replies)


def test_peft_models_whose_adapters_cannot_share_a_pass() -> None:
    dora = paceline.load(peft_model(use_dora=True), tokenizer=toy_tokenizer())
    assert len(dora.generate(TOKENS, max_new_tokens=3, ignore_eos=True).token_ids) == 3
    with pytest.raises(InvalidOption, match="no adapter 'one' is loaded"):
        dora.generate(TOKENS, adapter="one")
    prompt = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModel, match="a learned prompt"):
        paceline.load(prompt, tokenizer=toy_tokenizer())
    with pytest.raises(InvalidOption, match="cannot be added to a model object"):
        paceline.load(gpt2(), tokenizer=toy_tokenizer(), adapters={"x": "y"})


def test_without_a_drafter_an_adapter_may_have_one(tmp_path: Path) -> None:
    train(base_model(tmp_path / "base"), tmp_path / "one", target_modules=ATTENTION, r=4)
    llm = paceline.load(tmp_path / "base", drafter=None, adapters={"x": Adapter(tmp_path / "one", drafter="ngram")})
    used = [llm.generate(TOKENS, adapter=name, max_new_tokens=2).stats.drafter for name in (None, "x")]
    assert used == [None, "ngram"]
