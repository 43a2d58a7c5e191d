"""Adapters written by PEFT and merged into tiny random models, compared with PEFT's merge."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch import Tensor

import paceline
from paceline.checkpoints.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoints.lora import LoraAdapter, open_model, split_adapter
from paceline.checkpoints.model_config import read_config
from paceline.errors import AdapterMismatch, CorruptModel, InvalidOption, ModelNotFound, PacelineError, UnsupportedModel
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised, codes_of, mostly_codes
from paceline.sampling.parameters import Sampling
from paceline.types import Want
from paceline.verify.tree import pack_prefix
from tests.support.gguf_writing import HIDDEN, write_gguf
from tests.support.lazy import transformers
from tests.support.lora_training import SIZES, VARIANTS, base_model, train

CPU = torch.device("cpu")
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore PEFT's warnings about tied weights, which some of these tests use on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def logits(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    ours = Decoder(read_config(checkpoint.config), checkpoint.tensors, torch.float32, CPU)
    cache = ours.new_cache()
    return ours.forward(pack_prefix(tokens, cache.acquire(), 0, CPU), cache, Want()).logits[0, : len(tokens)]


def check_logits(checkpoint: Checkpoint, adapted: Any, vocab: int = 27) -> None:
    tokens = torch.randint(0, vocab, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        theirs = adapted(torch.tensor([tokens])).logits[0]
    ours = logits(checkpoint, tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_logits_equal_pefts(tmp_path: Path, variant: str) -> None:
    model = base_model(tmp_path / "base")
    adapted = train(model, tmp_path / "lora", **VARIANTS[variant])
    merged = open_model(tmp_path / "base", tmp_path / "lora")
    check_logits(merged, adapted)
    expected = adapted.merge_and_unload().state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])]
    assert changed
    assert set(merged.tensors) == set(expected)
    for name, tensor in expected.items():
        assert name in merged.tensors
        torch.testing.assert_close(merged.tensors[name], tensor, rtol=1e-5, atol=1e-5)


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "trained embedding": ({"modules_to_save": ["embed_tokens"]}, False),
    "trained head": ({"modules_to_save": ["lm_head"]}, False),
    "embedding with products": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "head with products": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "attention alone": ({}, True),
    "tied while trained": ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "tied products": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
}


@pytest.mark.parametrize("variant", TIED)
def test_a_tied_head_acts_as_in_training(tmp_path: Path, variant: str) -> None:
    options, tied = TIED[variant]
    adapted = train(
        base_model(tmp_path / "base", tied=True), tmp_path / "lora", **({"target_modules": ["q_proj"]} | options)
    )
    merged = open_model(tmp_path / "base", tmp_path / "lora")
    assert merged.config["tie_word_embeddings"] is tied
    check_logits(merged, adapted)


RESIZED: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (False, {}),
    (True, {"modules_to_save": ["embed_tokens"]}),
    (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    (True, {"target_modules": ["embed_tokens"]}),
]


@pytest.mark.parametrize(("tied", "options"), RESIZED, ids=str)
def test_added_tokens_grow_the_vocabulary(tmp_path: Path, tied: bool, options: dict[str, Any]) -> None:
    model = base_model(tmp_path / "base", tied=tied)
    model.resize_token_embeddings(30, mean_resizing=False)
    adapted = train(model, tmp_path / "lora", **({"target_modules": ["q_proj"]} | options))
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=True)
    merged = open_model(tmp_path / "base", tmp_path / "lora")
    assert read_config(merged.config).vocab_size == 30
    check_logits(merged, adapted, 30)


def test_transposed_weights_are_merged(tmp_path: Path) -> None:
    """GPT-2 stores weights as [in, out]. The decoder does not run GPT-2, but its tensors merge like others."""
    from paceline.checkpoints.lora import MergedTensors

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )
    for dora in (False, True):
        adapted = train(model, tmp_path, target_modules=["c_attn", "c_proj"], use_dora=dora, fan_in_fan_out=True)
        merged = MergedTensors(model.state_dict(), LoraAdapter(tmp_path, {}), untied=False)
        for name, tensor in adapted.merge_and_unload().state_dict().items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)


def test_projections_fused_in_the_base(tmp_path: Path) -> None:
    from paceline.checkpoints.lora import MergedTensors

    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, pad_token_id=0))
    adapted = train(model, tmp_path, target_modules=["qkv_proj", "gate_up_proj"], r=4)
    merged = MergedTensors(model.state_dict(), LoraAdapter(tmp_path, {}), untied=False)
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_merge_rounds_once(tmp_path: Path) -> None:
    """With a bfloat16 base, the sum is computed in float32, and only the model rounds it."""
    model = base_model(tmp_path / "base").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    train(model, tmp_path / "lora", target_modules=["q_proj"], r=4, lora_alpha=8)
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = model.state_dict()[name].double() + 2 * (
        tensors[Q0 + ".lora_B.weight"].double() @ tensors[Q0 + ".lora_A.weight"].double()
    )
    merged = open_model(tmp_path / "base", tmp_path / "lora").tensors[name]
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a base model, and an adapter that refers to it."""
    model = base_model(tmp_path / "base")
    train(model, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"], r=4)
    configure(tmp_path / "lora", base_model_name_or_path=str(tmp_path / "base"))
    return tmp_path / "base", tmp_path / "lora"


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of layer 0's query projection. None removes a tensor."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | {f"{Q0}.{name}.weight": tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def read_all(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return dict(checkpoint.tensors)


def test_an_adapter_is_a_reference_like_any_other(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    explicit, named = read_all(open_model(base, lora)), read_all(open_model(str(lora)))
    assert all(torch.equal(explicit[name], named[name]) for name in explicit)
    (lora / "f16.gguf").write_bytes(b"GGUF")  # llama.cpp's copy of an adapter in the same folder is not a model
    assert set(read_all(open_model(str(lora)))) == set(explicit)


def test_targets_and_draft_models_load_with_adapters(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    wanted = Sampling(max_new_tokens=24, seed=3, temperature=1.0, ignore_eos=True)
    plain = paceline.load(base, dtype="float32", drafter=None).generate("abc", wanted, raw=True)
    alone = paceline.load(lora, dtype="float32", drafter=None).generate("abc", wanted, raw=True)
    assert alone.token_ids != plain.token_ids
    for draft in (f"model:{lora}", f"model:{base}@{lora}"):
        llm = paceline.load(base, adapter=lora, dtype="float32", drafter=draft, draft=3)
        reply = llm.generate("abc", wanted, raw=True)
        assert reply.token_ids == alone.token_ids
        assert reply.stats.acceptance == 1.0  # the draft model is the target itself


def test_adapters_and_their_bases_from_the_hub(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = pair
    configure(lora, base_model_name_or_path="owner/base", revision="v2")
    homes, asked = {"owner/base": base, "owner/lora": lora}, []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], "adapter_model.bin" in options["allow_patterns"]))
        return str(homes[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("paceline.files.hub._listing", lambda *_: [])
    named = read_all(open_model("owner/lora", revision="v1"))
    assert asked == [("owner/lora", "v1", False), ("owner/base", "v2", False)]
    explicit = read_all(open_model(base, "owner/lora"))
    assert all(torch.equal(explicit[name], named[name]) for name in explicit)
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match="allow_pickle"):
        open_model(base, "owner/lora")
    with pytest.raises(CorruptModel, match=r"adapter_model\.bin"):  # asked for, and no pickle inside
        open_model(base, "owner/lora", allow_pickle=True)
    assert asked[-1] == ("owner/lora", None, True)


def test_a_path_with_an_at_sign_is_no_pair(tmp_path: Path) -> None:
    (tmp_path / "me@home").mkdir()
    assert split_adapter(str(tmp_path / "me@home")) == (str(tmp_path / "me@home"), None)
    assert split_adapter("owner/base@owner/lora") == ("owner/base", "owner/lora")
    assert split_adapter("owner/base") == ("owner/base", None)


def test_a_gguf_base_merges_by_hugging_face_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    base = open_checkpoint(tmp_path / "m.gguf")
    sizes = {key: base.config[key] for key in SIZES if key in base.config}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, tie_word_embeddings=True, rms_norm_eps=1e-5)
    )
    model.load_state_dict({**read_all(base), "lm_head.weight": base.tensors["model.embed_tokens.weight"]})
    adapted = train(model.eval(), tmp_path / "lora", target_modules=["q_proj", "down_proj"])
    assert sizes["hidden_size"] == HIDDEN
    check_logits(open_model(tmp_path / "m.gguf", tmp_path / "lora"), adapted, 5)


def test_only_matrices_outside_the_adapter_keep_the_codes_of_the_base(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    base = open_checkpoint(tmp_path / "m.gguf")
    sizes = {key: base.config[key] for key in SIZES if key in base.config}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    train(model.eval(), tmp_path / "lora", target_modules=["q_proj", "lm_head"])
    merged = open_model(tmp_path / "m.gguf", tmp_path / "lora").tensors
    for name in merged:
        own = codes_of(merged, name)
        changed = "q_proj" in name or "lm_head" in name
        assert (own is None) == (changed or "norm" in name), name
        assert own is None or torch.equal(own.dequantised(), merged[name])
    assert codes_of(base.tensors, "model.layers.0.self_attn.q_proj.weight") is not None
    assert mostly_codes(merged)


def test_a_merged_folder_of_floats_has_no_codes(pair: tuple[Path, Path]) -> None:
    assert not mostly_codes(open_model(*pair).tensors)


@pytest.mark.parametrize("changed", ["q_proj", "v_proj", "up_proj"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_merged_projections_run_next_to_the_codes_of_the_base(tmp_path: Path, kind: str, changed: str) -> None:
    write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    config = open_checkpoint(tmp_path / "m.gguf").config
    sizes = {key: config[key] for key in SIZES if key in config}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    train(model.eval(), tmp_path / "lora", target_modules=[changed], r=2, lora_alpha=1)
    merged = open_model(tmp_path / "m.gguf", tmp_path / "lora")
    expected = logits(merged, [1, 2, 0, 4])
    ours = logits(replace(merged, tensors=Quantised(merged.tensors, "int8")), [1, 2, 0, 4])
    assert float((ours - expected).norm() / expected.norm()) < 0.2


def test_an_adapters_tokenizer_comes_with_it(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(lora / "tokenizer.json"))
    assert open_model(base, lora).tokenizer.vocab_size == 2


def test_pickled_adapters_need_a_word(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    expected = read_all(open_model(base, lora))
    torch.save(load_file(lora / "adapter_model.safetensors"), lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"adapter_model\.bin.*allow_pickle"):
        open_model(base, lora)
    pickled = read_all(open_model(base, lora, allow_pickle=True))
    assert all(torch.equal(expected[name], pickled[name]) for name in expected)


def test_keys_with_the_adapters_name(pair: tuple[Path, Path]) -> None:
    """Files written from a whole state dict contain "lora_A.default.weight"."""
    base, lora = pair
    expected = read_all(open_model(base, lora))
    path = lora / "adapter_model.safetensors"
    named = {
        name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."): t
        for name, t in load_file(path).items()
    }
    save_file({name + ".default" * name.endswith(("embedding_A", "embedding_B")): t for name, t in named.items()}, path)
    found = read_all(open_model(base, lora))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "IA3"),
        ({"peft_type": "PREFIX_TUNING"}, UnsupportedModel, "PREFIX_TUNING"),
        ({"peft_type": "ADALORA"}, UnsupportedModel, "ADALORA"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, UnsupportedModel, "target_parameters"),
        ({"trainable_token_indices": [1]}, UnsupportedModel, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModel, "pissa_niter_4"),
        ({"use_dora": True}, CorruptModel, "lora_magnitude_vector"),
        ({"r": 8}, CorruptModel, r"A \(4, \d+\) and B \(\d+, 4\) for model.*rank 8"),
        ({"rank_pattern": {"q_proj": 2}}, CorruptModel, "q_proj, but its config says rank 2"),
        ({"rank_pattern": {"q_(": 2}}, CorruptModel, r"holds the pattern 'q_\('"),
        ({"r": 0}, CorruptModel, "r must be a whole number from 1 .* got 0"),
        ({"r": "four"}, CorruptModel, "four"),
        ({"lora_alpha": ...}, CorruptModel, "lacks lora_alpha"),
        ({"alpha_pattern": [1]}, CorruptModel, "alpha_pattern must be an object"),
    ],
    ids=str,
)
def test_configs_that_are_refused(
    pair: tuple[Path, Path], changes: dict[str, Any], kind: type[PacelineError], words: str
) -> None:
    configure(pair[1], **changes)
    with pytest.raises(kind, match=words) as caught:
        open_model(*pair)
    assert str(pair[1]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_factors_that_are_damaged(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    for changes, words in [
        ({"lora_B": None}, r"holds no lora_B for model\.layers\.0\.self_attn\.q_proj"),
        ({"lora_A": None, "lora_B": torch.zeros(16, 4)}, "holds no lora_A"),
        ({"lora_A": torch.zeros(3, 16)}, r"A \(3, 16\) and B \(16, 4\)"),
        ({"lora_A": torch.zeros(64)}, r"A \(64,\)"),
    ]:
        rewrite(lora, **changes)
        with pytest.raises(CorruptModel, match=words):
            open_model(base, lora)


def test_files_that_are_damaged(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    path = lora / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CorruptModel, match="cut off"):
        open_model(base, lora)
    save_file({"model.norm.weight": torch.ones(16)}, path)
    with pytest.raises(CorruptModel, match="no LoRA weights"):
        open_model(base, lora)
    path.unlink()
    with pytest.raises(ModelNotFound, match=r"adapter_model\.safetensors"):
        open_model(base, lora)
    (lora / "adapter_config.json").write_text("{")
    with pytest.raises(CorruptModel, match="valid JSON"):
        open_model(base, lora)


def test_an_adapter_of_another_model_is_told_apart(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    _, lora = pair
    shallow, narrow = tmp_path / "shallow", tmp_path / "narrow"
    base_model(shallow, num_hidden_layers=1)
    base_model(narrow, hidden_size=8)
    with pytest.raises(AdapterMismatch, match=rf"layers\.1\.self_attn\.q_proj.*trained for {pair[0]}"):
        open_model(shallow, lora)
    with pytest.raises(AdapterMismatch, match=r"embed_tokens\.weight: \(27, 16\) where the base has \(27, 8\)"):
        paceline.load(narrow, adapter=lora)
    merged = open_model(narrow, lora)
    with pytest.raises(AdapterMismatch, match=r"q_proj: A \(4, 16\) and B \(16, 4\) for a weight \(8, 8\)"):
        merged.tensors["model.layers.0.self_attn.q_proj.weight"]


def test_a_vocabulary_that_grew_on_one_side_only(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    path = lora / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.weight": torch.zeros(30, 16)}, path)
    with pytest.raises(AdapterMismatch, match=r"27 rows for model\.embed_tokens\.weight and 30 rows"):
        open_model(base, lora)


def test_a_tensor_that_the_base_has_no_place_for(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    path = lora / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.score.weight": torch.zeros(2, 16)}, path)
    with pytest.raises(AdapterMismatch, match=r"at score: .* has no such module"):
        open_model(base, lora)


def test_an_adapters_base_must_be_there(pair: tuple[Path, Path]) -> None:
    base, lora = pair
    configure(lora, base_model_name_or_path="/workspace/llama")
    with pytest.raises(ModelNotFound, match=r"base model of the adapter.*/workspace/llama.*Name the base model"):
        open_model(lora)
    configure(lora, base_model_name_or_path=None)
    with pytest.raises(ModelNotFound, match="does not say which model"):
        open_model(lora)
    with pytest.raises(UnsupportedModel, match="is an adapter, not a model"):
        open_model(lora, lora)
    with pytest.raises(InvalidOption, match="not a LoRA adapter"):
        open_model(base, base)
