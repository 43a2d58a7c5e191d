"""What Paceline is measured against: transformers, reading the same GGUF file with a reader of its own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import fail
from torch import Tensor

if TYPE_CHECKING:
    from paceline.models.loader import Loaded


class Transformers:
    """A dense model and a tokenizer by transformers, greedy, with its defaults: sdpa attention, dynamic KV cache."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Takes some 20 s: transformers converts the file tensor by tensor."""
        transformers = _library()
        transformers.logging.disable_progress_bar()
        # Its note on packed weights is not about this load; `_check_dense` makes sure of it.
        transformers.logging.set_verbosity_error()
        where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _has_packed(transformers) else {}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **dense).eval()
        _check_dense(self.model, dtype)
        self._config = transformers.GenerationConfig
        ids = self.model.generation_config.eos_token_id
        self.eos: set[int] = set(ids) if isinstance(ids, list) else {ids}
        """Tokens that end a reply: those that transformers read from the file, until told otherwise."""

    def encode(self, text: str) -> list[int]:
        """A user's message through transformers' own rendering of the chat template."""
        message = [{"role": "user", "content": text}]
        shown = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return list(shown["input_ids"])

    def generate(self, ids: list[int], count: int, lookup: int | None = None) -> list[int]:
        """The greedy reply; `lookup`: draft tokens of its prompt lookup decoding."""
        return list(self._generate(ids, count, prompt_lookup_num_tokens=lookup)[0, len(ids) :].tolist())

    def generate_with_logits(self, ids: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """The greedy reply and, for each of its tokens, the logits [V] it was the largest of."""
        out = self._generate(ids, count, output_logits=True, return_dict_in_generate=True)
        return out.sequences[0, len(ids) :].tolist(), [row[0] for row in out.logits]

    def _generate(self, ids: list[int], count: int, **options: Any) -> Any:
        config = self._config(
            max_new_tokens=count,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=sorted(self.eos),
            pad_token_id=min(self.eos),
            **options,
        )
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            return self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)


def model_file(loaded: Loaded) -> Path:
    """The GGUF file behind a loaded model; ends the program where it is another kind."""
    if loaded.path.suffix != ".gguf":
        fail(f"{loaded.path} is not a GGUF file, and transformers is given the same file to read")
    return loaded.path


def _library() -> Any:
    try:
        import_module("accelerate")
        return import_module("transformers")
    except ImportError as error:
        fail(f"this script compares with transformers, and {error.name} is not installed: pip install -e '.[dev]'")


def _has_packed(transformers: Any) -> bool:
    """Newer versions leave GGUF weights of some families packed unless told otherwise, which is slow on a CPU."""
    return hasattr(transformers, "GgufConfig")


def _check_dense(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """A baseline that unpacked its weights at every pass would flatter us."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and (type(module) is not torch.nn.Linear or module.weight.dtype != dtype):
            fail(f"transformers loaded {name} as {type(module).__name__}, not as a dense {dtype} layer")
