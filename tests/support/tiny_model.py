"""A model on disk that any server loads in a second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from paceline.testing import TINY, random_tensors
from tests.support.vocabularies import byte_level

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def write_tiny(folder: Path, context_length: int = 8192) -> Path:
    """Write a random Llama with tens of thousands of weights. Its tokens are bytes and syllables."""
    words = byte_level()
    config = replace(TINY, vocab_size=words.vocab_size, context_length=context_length)
    folder.mkdir(exist_ok=True)
    save_file(random_tensors(config), folder / "model.safetensors")
    words._backend.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "eos_token_id": words.eos_token_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
