"""Other programs that write with the same weights, each an optional extra: transformers, llama.cpp, OpenVINO GenAI.

Each runs in a process of its own (`child.py`). All read the same file at their own defaults, are given the same
rendered prompt, which each tokenises itself, and end at the same tokens. None may keep anything of an earlier prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.bench.measure import MeasuredReply
from paceline.errors import PacelineError


class Missing(PacelineError):
    """A peer that is not installed, or cannot read this model."""


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer is told before the first prompt. `path`: of the model. `eos`: tokens that end a reply. `tokens`: of a
    reply at most. `positions`: of the longest prompt and its reply. `device`: as torch names it."""

    path: str
    eos: tuple[int, ...]
    tokens: int
    positions: int
    threads: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt, rendered. `lookup`: whether to draft by prompt lookup. `temperature`: 0 is greedy."""

    prompt: str
    temperature: float = 0.0
    lookup: bool = False
    seed: int = 0


PeerAnswer = Callable[[PeerPrompt], MeasuredReply]

PEERS: dict[str, str] = {
    "transformers": f"{__name__}:transformers",
    "llama.cpp": f"{__name__}:llama_cpp",
    "openvino": f"{__name__}:openvino",
}
"""Name -> the function that begins it, `PeerSetup` to `PeerAnswer`, as module:function."""


class Transformers:
    """A dense model and a tokenizer by transformers, with its defaults: sdpa attention, dynamic KV cache."""

    lookup = 10
    """Draft tokens of its prompt lookup, as its documentation has it."""

    def __init__(self, path: Path, dtype: Any, device: str = "cpu") -> None:
        """A GGUF file takes some 20 s: transformers converts it tensor by tensor."""
        self.library = _library("transformers", "transformers accelerate")
        self.library.logging.disable_progress_bar()
        # Its note on packed weights is not about this load; `_check_dense` makes sure of it.
        self.library.logging.set_verbosity_error()
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        dense: dict[str, Any] = {}
        if path.is_file():
            _library("accelerate", "accelerate")
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
            # Newer versions leave some GGUF weights packed, which is slow on a CPU and would flatter us.
            if hasattr(self.library, "GgufConfig"):
                dense = {"quantization_config": self.library.GgufConfig(dequantize=True)}
        self.tokenizer = self.library.AutoTokenizer.from_pretrained(**where)
        model = self.library.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **dense)
        self.model = model.eval().to(device)
        _check_dense(self.model, dtype)

    def encode(self, prompt: str) -> list[int]:
        """Of a rendered prompt."""
        return list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def generate(self, ids: list[int], count: int, eos: tuple[int, ...], **options: Any) -> Any:
        """What its `generate` returns for `options` of its GenerationConfig; greedy without any."""
        streamer = options.pop("streamer", None)
        choices = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": count} | options
        config = self.library.GenerationConfig(eos_token_id=sorted(eos), pad_token_id=min(eos), **choices)
        torch = import_module("torch")
        prompt = torch.tensor([ids], device=self.model.device)
        with torch.inference_mode():
            return self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=streamer
            )


def transformers(job: PeerSetup) -> PeerAnswer:
    """`generate` in bfloat16, and its prompt lookup."""
    torch = import_module("torch")
    torch.set_num_threads(job.threads)
    peer = Transformers(Path(job.path), torch.bfloat16, job.device)

    def answer(ask: PeerPrompt) -> MeasuredReply:
        watch = Watch()
        ids = peer.encode(ask.prompt)
        options: dict[str, Any] = {"prompt_lookup_num_tokens": peer.lookup} if ask.lookup else {}
        if ask.temperature:
            torch.manual_seed(ask.seed)
            options |= {"do_sample": True, "temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
        out = peer.generate(ids, job.tokens, job.eos, streamer=_Puts(watch), **options)
        reply = out[0, len(ids) :].tolist()
        peer.tokenizer.decode(reply, skip_special_tokens=True)
        return MeasuredReply(reply, watch.first)

    return answer


def llama_cpp(job: PeerSetup) -> PeerAnswer:
    """llama-cpp-python on the GGUF file, at the file's own precision, and its prompt lookup of 10 tokens."""
    library = _library("llama_cpp", "llama-cpp-python")
    path = _gguf(job, "llama.cpp")

    @cache
    def model(lookup: bool) -> Any:
        drafting = import_module("llama_cpp.llama_speculative")
        return library.Llama(
            model_path=path,
            n_ctx=job.positions + 64,
            n_threads=job.threads,
            n_threads_batch=job.threads,
            draft_model=drafting.LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None,
            verbose=False,
        )

    def answer(ask: PeerPrompt) -> MeasuredReply:
        llama = model(ask.lookup)
        watch = Watch()
        llama.reset()  # it would keep what two prompts in a row begin with
        ids = llama.tokenize(ask.prompt.encode(), add_bos=False, special=True)
        reply: list[int] = []
        sampling = {"temp": ask.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in llama.generate(ids, **sampling):
            watch.see()
            reply.append(token)
            if token in job.eos or len(reply) == job.tokens:
                break
        llama.detokenize(reply)
        return MeasuredReply(reply, watch.first)

    model(False)
    return answer


def openvino(job: PeerSetup) -> PeerAnswer:
    """OpenVINO GenAI on the GGUF file, and its prompt lookup of 5 tokens."""
    library = _library("openvino_genai", "openvino-genai")
    path = _gguf(job, "OpenVINO GenAI")

    class Seen(library.StreamerBase):  # type: ignore[misc, name-defined]
        """Notes when tokens come."""

        def __init__(self, watch: Watch) -> None:
            super().__init__()
            self.watch = watch

        def write(self, tokens: Any) -> Any:
            self.watch.see()
            return library.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    @cache
    def pipeline(lookup: bool) -> Any:
        options: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
        # Its own default, but for the cache of prompts, out of which a second asking would be answered.
        options["scheduler_config"] = library.SchedulerConfig()
        options["scheduler_config"].max_num_batched_tokens = 2**31 - 1
        options["scheduler_config"].enable_prefix_caching = False
        return library.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=job.threads, **options)

    def answer(ask: PeerPrompt) -> MeasuredReply:
        writer, config = pipeline(ask.lookup), _openvino_config(library, job, ask)
        watch = Watch()
        tokenizer = writer.get_tokenizer()
        result = writer.generate(tokenizer.encode(ask.prompt, add_special_tokens=False), config, Seen(watch))
        reply = list(result.tokens[0])
        tokenizer.decode(reply)
        return MeasuredReply(reply, watch.first)

    pipeline(False)
    return answer


def _openvino_config(library: Any, job: PeerSetup, ask: PeerPrompt) -> Any:
    config = library.GenerationConfig()
    config.max_new_tokens = job.tokens
    config.apply_chat_template = False
    config.set_eos_token_id(job.eos[0])
    config.stop_token_ids = set(job.eos)
    config.do_sample = ask.temperature > 0
    if config.do_sample:
        config.temperature, config.rng_seed = ask.temperature, ask.seed
    if ask.lookup:
        config.num_assistant_tokens, config.max_ngram_size = 5, 3
    return config


class Watch:
    """Time to the first token."""

    def __init__(self) -> None:
        self._began, self.first = time.perf_counter(), 0.0

    def see(self) -> None:
        """A token has come."""
        self.first = self.first or time.perf_counter() - self._began


class _Puts:
    """A streamer of transformers: the prompt is put in before the tokens."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._prompt = watch, True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._watch.see()
        self._prompt = False

    def end(self) -> None:
        pass


def _library(name: str, packages: str) -> Any:
    if find_spec(name) is None:
        raise Missing(f"{name} is not installed", f"pip install {packages}")
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise Missing(f"{name} cannot be imported ({error})", f"pip install {packages}") from error


def _gguf(job: PeerSetup, name: str) -> str:
    if not job.path.endswith(".gguf"):
        raise Missing(f"{name} reads the same file, and {job.path} is no GGUF file", "Give a GGUF file")
    if job.device != "cpu":
        raise Missing(f"{name} is compared on the CPU alone, and the model is on {job.device}", "Add --device cpu")
    return job.path


def _check_dense(model: Any, dtype: Any) -> None:
    """A baseline that unpacked its weights at every pass would flatter us."""
    linear = import_module("torch.nn").Linear
    for name, module in model.named_modules():
        if name.endswith("_proj") and (type(module) is not linear or module.weight.dtype != dtype):
            kind = type(module).__name__
            raise Missing(f"transformers loaded {name} as {kind}, not as a dense {dtype} layer", "Give a dense model")
