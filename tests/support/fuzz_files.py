"""Nearly valid model files: valid files with a few random changes, read with limits on time and memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.checkpoints.loader import native_config
from paceline.checkpoints.lora import open_model
from paceline.errors import PacelineError
from paceline.files.locate import resolve
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.testing.tiny import TINY, random_tensors
from tests.support.gguf_writing import Q, write_gguf
from tests.support.golden import read
from tests.support.older_configs import OLDER
from tests.support.random_heads import BLOCK, COMPACT, EAGLE3, EXIT, MEDUSA, head_of
from tests.support.tiny_families import FAMILIES, SIZES

CASE_SECONDS, MEMORY = 5.0, 1 << 30
"""Limits for one file: CPU seconds, and bytes in addition to the process's memory at the start."""

_ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 4097, 2**24 + 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, -2.5, 1e-300, 1e-7, 1e30, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "8", "abc", "a" * 5000, "a\nb", "\ud800", "\0", "..", "/dev/zero", "full_attention", "sliding_attention"),
    *([], [[]], {}, [None], ["a"], [1, 2, 3], [-1], [1.5], [2**63], {"a": 1}, {"": None}, [0] * 1000, [{}]),
    json.loads("[" * 100 + "]" * 100),
    *("linear", "dynamic", "yarn", "longrope", "llama3", *OLDER, "gelu", "gpt2"),
]


class Hang(BaseException):
    """A file took too long. This is a BaseException, so that no `except Exception` catches it."""


@contextmanager
def limits(seconds: float, memory: int) -> Iterator[None]:
    """Raise `Hang` after `seconds` of CPU time, and make allocations fail beyond `memory` additional bytes."""

    def stop(*_: object) -> None:
        raise Hang

    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory, old[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, old)


def changed(rng: random.Random, document: Any) -> Any:
    """Return a copy of a JSON document with one to three changes."""
    whole = {"": deepcopy(document)}
    for _ in range(rng.choice((1, 1, 2, 3))):
        holder, key = rng.choice(list(_places(whole)))
        match rng.randrange(6):
            case 0 if holder is not whole:
                del holder[key]
            case 1 if isinstance(holder, dict) and holder is not whole:
                holder[rng.choice([*holder, "type", "rope_type", "factor", "x\n"])] = holder.pop(key)
            case 2 if isinstance(holder[key], (int, float)) and abs(holder[key]) < 2**70:
                holder[key] *= rng.choice((-1, 0, 2, 0.5, 1e9, 2**40))
            case 3:
                holder[key] = {str(holder[key])[:9]: holder[key]} if rng.random() < 0.5 else [holder[key]] * 3
            case _:
                holder[key] = deepcopy(rng.choice(_ODD))
    return whole[""]


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (list or object, index or key) in a document."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def damaged(rng: random.Random, data: bytes, end: int) -> bytes:
    """Return the bytes with a few changes before `end`, or truncated."""
    if rng.random() < 0.1:
        return data[: rng.randrange(len(data))]
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(end, len(found)))
        number = rng.choice((0, 1, 2, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        new = rng.choice(
            (bytes([rng.randrange(256)]), struct.pack("<I", number & (2**32 - 1)), struct.pack("<Q", number))
        )
        found[at : at + len(new)] = new
    return bytes(found)


def as_json(rng: random.Random, document: Any) -> bytes:
    """Return a changed document as JSON text, which is sometimes damaged too."""
    text = json.dumps(changed(rng, document) if rng.random() < 0.9 else document).encode()
    return text if rng.random() < 0.9 or not text else damaged(rng, text, len(text))


class Files:
    """Valid files in a folder, and readers for them. `trial` damages a file, reads it and restores it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = folder / "model"
        _write_model(self._model)
        self._adapter = _write_adapter(folder / "adapter")
        configs = {"eagle3": EAGLE3, "medusa": MEDUSA, "paceline": COMPACT, "block": BLOCK, "exit": EXIT}
        self._heads = [write_head(folder / name, head_of(config)) for name, config in configs.items()]
        self._families = [{"model_type": name} | SIZES | OLDER[name] for name in OLDER]
        self._families += [read(case).config for case in FAMILIES]
        self._gguf = []
        names = ("llama", "smollm3", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "qwen3moe")
        for name, kind in zip(names, (Q.F32, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.F16, Q.BF16), strict=True):
            write_gguf(folder / f"{name}.gguf", name, kind=kind, fields={f"{name}.rope.freq_base": 1e6})
            self._gguf.append((folder / f"{name}.gguf").read_bytes())
        write_gguf(folder / "spm.gguf", fields=_SENTENCEPIECE)
        self._gguf.append((folder / "spm.gguf").read_bytes())

    def trial(self, rng: random.Random) -> str:
        """Damage a file and read it. Return the outcome.

        Raises:
            AssertionError: For any error other than a `PacelineError` with a one-line message.
        """
        kind = rng.choice([*[self._config] * 3, self._json, self._safetensors, *[self._header] * 2])
        path, data, read = kind(rng)
        whole = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        try:
            with limits(CASE_SECONDS, MEMORY):
                read()
        except PacelineError as error:
            if str(error).isprintable():
                return f"{type(error).__name__} of {path.name}"
            raise AssertionError(f"{path.name}: {error!r} is not one line") from error
        except BaseException as error:
            shutil.copy(path, self._folder / "failed")
            raise AssertionError(f"{path.name}: {error!r}; the file is kept as {self._folder / 'failed'}") from error
        finally:
            path.write_bytes(whole) if whole is not None else path.unlink()
        return f"{path.name} was read"

    def _config(self, rng: random.Random) -> tuple[Path, bytes, Callable[[], object]]:
        path = self._model / "config.json"
        document = json.loads(path.read_text()) if rng.random() < 0.4 else rng.choice(self._families)
        return path, as_json(rng, document), lambda: use(self._model)

    def _json(self, rng: random.Random) -> tuple[Path, bytes, Callable[[], object]]:
        folder = rng.choice([self._model] * 4 + [self._adapter] * 2 + self._heads)
        names = sorted(path for path in folder.glob("*.json") if (folder, path.name) != (self._model, "config.json"))
        path = rng.choice(names)
        readers: dict[Path, Callable[[], object]] = {
            self._model: lambda: use(self._model),
            self._adapter: lambda: dict(open_model(self._model, self._adapter).tensors),
        }
        return path, as_json(rng, json.loads(path.read_text())), readers.get(folder, lambda: open_head(folder))

    def _safetensors(self, rng: random.Random) -> tuple[Path, bytes, Callable[[], object]]:
        folder = rng.choice([self._model, *self._heads])
        path = rng.choice(sorted(folder.glob("*.safetensors")))
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if rng.random() < 0.5:
            data = damaged(rng, data, 8 + size)
        else:
            header = as_json(rng, json.loads(data[8 : 8 + size]))
            data = len(header).to_bytes(8, "little") + header + data[8 + size :]
        return path, data, lambda: use(folder) if folder == self._model else open_head(folder)

    def _header(self, rng: random.Random) -> tuple[Path, bytes, Callable[[], object]]:
        path = self._folder / "x.gguf"
        if rng.random() < 0.5:
            data = rng.choice(self._gguf)
            return path, damaged(rng, data, 1800), lambda: use(path)
        name = rng.choice(("llama", "smollm3", "qwen3", "phi3", "gemma2", "gemma3", "qwen3moe"))
        keys = rng.sample([key.replace("*", name) for key in _GGUF_KEYS], rng.choice((1, 1, 2)))
        write_gguf(path, name, fields={key: rng.choice(_GGUF_ODD) for key in keys})
        return path, path.read_bytes(), lambda: use(path)


_SENTENCEPIECE = {"tokenizer.ggml.scores": [-1.0, -2.0, -3.0, 0.0, 0.0], "tokenizer.ggml.unknown_token_id": 0}
_GGUF_ODD: list[Any] = [
    *(0, 1, -1, 2, 3, 6, 255, 4097, 2**31 - 1, -(2**31), 0.5, -1.0, 1e-30, 1e30, float("nan"), float("inf")),
    *("", "abc", "8", "linear", "yarn", "longrope", "llama", "gpt2", "a" * 5000, "a\nb", True, False),
    *([1], ["a"], [1.5], [0] * 50, [-1, 2], [True, False], ["a"] * 5, [1, 2, 3, 4, 5], [0.5] * 5),
]
_GGUF_KEYS = [
    *("general.type", "general.alignment", "split.count", "tokenizer.chat_template", "tokenizer.ggml.scores"),
    *(f"tokenizer.ggml.{role}_token_id" for role in ("eot", "eom", "unknown", "padding")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"),
    *(f"*.attention.{x}" for x in ("key_length", "value_length", "sliding_window", "sliding_window_pattern")),
    *(f"*.rope.{x}" for x in ("freq_base", "freq_base_swa", "dimension_count", "scale_linear", "scaling.type")),
    *(f"*.rope.scaling.{x}" for x in ("factor", "original_context_length", "yarn_beta_fast", "yarn_attn_factor")),
    *("*.expert_count", "*.expert_used_count", "*.expert_feed_forward_length", "*.final_logit_softcapping"),
]


def use(path: Path) -> None:
    """Open a model. If the native decoder supports it, generate a few tokens."""
    checkpoint = open_checkpoint(resolve(path))
    config = native_config(checkpoint)
    eos_token_ids(checkpoint.config, checkpoint.generation, checkpoint.tokenizer)
    checkpoint.tokenizer.encode("abc")
    if config is None:
        return
    # The second case runs the GGUF's own quantised weights.
    for dtype, tensors in (
        (torch.float32, checkpoint.tensors),
        (torch.bfloat16, Quantised(checkpoint.tensors, "int8")),
    ):
        run(Decoder(config, tensors, dtype, torch.device("cpu")), [1, 2, 3], Sampling(max_new_tokens=3))


def _write_model(folder: Path) -> None:
    """Write a Llama with two shards and all other files that the loader reads."""
    folder.mkdir()
    config = replace(TINY, tied=False)
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
        "eos_token_id": [2],
    }
    backend = Backend(models.BPE(vocab={chr(97 + i): i for i in range(26)} | {"ab": 26}, merges=[("a", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    tensors = random_tensors(config)
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, folder / file)
    token = {"content": "<s>", "special": True, "lstrip": False}
    files: dict[str, Any] = {
        "config.json": raw,
        "generation_config.json": {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.7, "top_k": 20},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "b"},
            "added_tokens_decoder": {"27": token},
            "add_bos_token": True,
            "chat_template": [{"name": "default", "template": "{{ messages }}"}],
        },
        "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "eos_token": "b"},
        "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": where},
    }
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))


def _write_adapter(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {r"layers\.1\..*q_proj": 2},
        "alpha_pattern": {"k_proj": 3.0},
        "base_model_name_or_path": "nowhere",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)}
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
