"""`paceline info` and `load` share one decision about how a model runs, or why it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from typer.testing import CliRunner

import paceline
from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.loader import load_model, native_config
from paceline.checkpoints.lora import open_model
from paceline.cli import app
from paceline.errors import CorruptModel, PacelineError, UnsupportedModel
from paceline.models.decoder import Decoder
from paceline.models.refusals import refuse_other_heads
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from tests.support.gguf_writing import write_gguf
from tests.support.lazy import transformers
from tests.support.tiny_families import SIZES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, name: str = "Llama", **changes: Any) -> Any:
    """Save a model with tied embeddings with transformers, and a tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**SIZES | {"tie_word_embeddings": True} | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    Backend(models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[])).save(str(folder / "tokenizer.json"))
    return model


def rewrite(folder: Path, change: dict[str, object]) -> None:
    """Change entries of the config. None removes an entry."""
    raw = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def stored(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_head(tensors: dict[str, torch.Tensor]) -> None:
    """Save the tied matrix only under the head's name, as some versions of transformers do."""
    tensors[HEAD] = tensors.pop(EMBEDDING)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma2"])
@pytest.mark.parametrize("said", [True, False], ids=["said", "by default"])
def test_a_tied_matrix_stored_as_the_head_is_loaded(tmp_path: Path, name: str, said: bool) -> None:
    model = save(tmp_path, name)
    stored(tmp_path, as_head)
    if not said and name == "Gemma2":
        rewrite(tmp_path, {"tie_word_embeddings": None})
    target = load_model(tmp_path, dtype="float32", device="cpu").target
    assert isinstance(target, Decoder)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert run(target, [5, 6, 7], Sampling(max_new_tokens=8))[0] == expected
    assert set(open_checkpoint(tmp_path).tensors) & {EMBEDDING, HEAD} == {EMBEDDING}


def test_an_untied_model_without_an_embedding_is_refused(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=False)
    stored(tmp_path, lambda tensors: tensors.pop(EMBEDDING))
    with pytest.raises(PacelineError, match=rf"lacks {EMBEDDING}"):
        load_model(tmp_path)


def test_an_adapter_on_a_tied_matrix_stored_as_the_head(tmp_path: Path) -> None:
    save(tmp_path / "base")
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{EMBEDDING.removesuffix('.weight')}.lora_embedding_"
    factors = {prefix + "A": torch.ones(1, 101), prefix + "B": torch.ones(48, 1)}
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    before = dict(open_model(tmp_path / "base", tmp_path / "lora").tensors)
    stored(tmp_path / "base", as_head)
    after = open_model(tmp_path / "base", tmp_path / "lora")
    assert native_config(after) is not None
    assert set(after.tensors) == set(before)
    assert all(torch.equal(after.tensors[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"), "lacks model.layers.3.mlp.up_proj.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}),
            "has shape (7,), but the config requires",
        ),
        (lambda tensors: tensors.update({"model.layers.9.x": torch.ones(1)}), "does not know (model.layers.9.x"),
        (lambda tensors: tensors.pop(EMBEDDING), f"lacks {EMBEDDING}"),
    ],
)
def test_info_refuses_what_load_refuses_in_the_same_words(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    save(tmp_path)
    stored(tmp_path, change)
    with pytest.raises(PacelineError) as caught:
        load_model(tmp_path)
    assert said in caught.value.cause
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == f"error: {caught.value}\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llamma"}, "model type `llamma` but Transformers does not recognize"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not known, and transformers does not load"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope scaling 'foo' is not supported, and transformers does not"),
        ({"model_type": "t5"}, "no causal language model of type 't5'. Use a decoder-only model"),
        ({"model_type": "bert", "is_decoder": False}, "attends in both directions"),
    ],
)
def test_info_and_load_agree_on_what_transformers_would_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    save(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(PacelineError) as caught:
        load_model(tmp_path)
    assert said in str(caught.value)
    capfd.readouterr()
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, f"error: {caught.value}\n")
    assert capfd.readouterr() == ("", ""), "nothing of the library's own"


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "Qwen2ForRewardModel", "LlamaModel"])
def test_a_model_with_another_head_is_refused(tmp_path: Path, head: str) -> None:
    save(tmp_path)
    rewrite(tmp_path, {"architectures": [head]})
    with pytest.raises(UnsupportedModel, match=f"describes a {head}, which is not a language model") as caught:
        load_model(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, f"error: {caught.value}\n")


def test_a_classifier_as_transformers_writes_it_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    config = transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True})
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    stored(tmp_path, lambda tensors: tensors.pop("score.weight"))  # all else is a language model's
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification"):
        load_model(tmp_path)


def test_every_language_model_of_transformers_is_known_by_its_class() -> None:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in names:
        refuse_other_heads({"architectures": [name]})


def test_weights_that_transformers_would_make_up_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "GPT2", n_embd=48, n_layer=2, n_head=2)
    load_model(tmp_path, device="cpu")
    stored(tmp_path, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(CorruptModel, match=r"lack 1 tensors \(transformer\.h\.1\.mlp\.c_fc\.weight\)"):
        load_model(tmp_path, device="cpu")


def test_pickles_and_revisions_are_allowed_to_draft_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft"):
        save(tmp_path / name)
        torch.save(load_file(tmp_path / name / "model.safetensors"), tmp_path / name / "pytorch_model.bin")
        (tmp_path / name / "model.safetensors").unlink()
    asked = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(tmp_path / name.partition("/")[2])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    llm = paceline.load("o/target", drafter="model:o/draft", revision="v1", draft_revision="v2", allow_pickle=True)
    assert llm.drafter == "model:o/draft"
    assert set(asked) == {("o/target", "v1"), ("o/draft", "v2")}


def test_info_says_what_runs_through_transformers(tmp_path: Path) -> None:
    save(tmp_path, "GPT2", n_embd=48, n_layer=1, n_head=2)
    result = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["runs"] == "through transformers"


def test_info_reads_no_tensor_to_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.checkpoints.gguf_tensors import GGUFTensors

    write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")

    def read(self: GGUFTensors, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was dequantised")

    monkeypatch.setattr(GGUFTensors, "__getitem__", read)
    assert native_config(checkpoint) is not None
