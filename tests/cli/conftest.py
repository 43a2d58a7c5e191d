"""Fixtures for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import paceline.llm
from paceline.testing import TINY, random_tensors
from tests.support.toy_cli import (
    Shop,
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the user's own configuration from tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    for name in ("PACELINE_MODEL", "PACELINE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop()
    monkeypatch.setattr(paceline.llm, "load", shop.load)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return shop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the tiny model as a Hugging Face folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    c = TINY
    sizes = {"hidden_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    sizes |= {"num_key_value_heads": c.kv_heads, "intermediate_size": c.ffn, "vocab_size": c.vocab_size}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes}
    config |= {"max_position_embeddings": c.context_length, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    words = {f"w{i}": i for i in range(c.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file(random_tensors(c), tmp_path / "model.safetensors")
    return tmp_path
