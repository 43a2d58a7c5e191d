"""Other programs that write with the same weights, each an optional extra: transformers, llama.cpp, OpenVINO GenAI.

All read the same file and are given the same rendered prompt; each tokenises it itself. Greedy, except where a
temperature is given, which every one draws its own way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paceline.bench.measure import Reply, Write
from paceline.errors import PacelineError
from paceline.llm import LLM


@dataclass(frozen=True, slots=True)
class Setting:
    """How all systems write. `lookup`: draft tokens of a peer's prompt lookup, None without."""

    tokens: int
    temperature: float
    threads: int
    lookup: int | None = None


class Missing(PacelineError):
    """A peer that is not installed, or cannot read this model."""


Peer = Callable[[LLM, Setting], Write]


def transformers(llm: LLM, setting: Setting) -> Write:
    """`generate` with its defaults, bfloat16, and its prompt lookup."""
    library = _library("transformers", "transformers accelerate")
    path = llm.model.path
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        # Newer versions leave some GGUF weights packed, which is slow on a CPU and would flatter us.
        if hasattr(library, "GgufConfig"):
            where["quantization_config"] = library.GgufConfig(dequantize=True)
    torch = import_module("torch")
    library.logging.disable_progress_bar()
    library.logging.set_verbosity_error()
    model = library.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).eval()
    where.pop("quantization_config", None)
    tokenizer = library.AutoTokenizer.from_pretrained(**where)
    sampled = {"do_sample": True, "temperature": setting.temperature} if setting.temperature else {"do_sample": False}
    config = library.GenerationConfig(
        max_new_tokens=setting.tokens,
        repetition_penalty=1.0,
        eos_token_id=sorted(llm.model.eos),
        pad_token_id=min(llm.model.eos),
        prompt_lookup_num_tokens=setting.lookup,
        **sampled,
    )

    class First(library.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
        """Notes when the first tokens come; the prompt itself is put in before them."""

        def __init__(self) -> None:
            self.puts, self.at = 0, 0.0

        def put(self, value: Any) -> None:
            self.puts += 1
            if self.puts == 2:
                self.at = time.perf_counter()

        def end(self) -> None:
            pass

    def write(text: str) -> Reply:
        began, first = time.perf_counter(), First()
        ids = tokenizer(_prompt(llm, text), add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=first)
        reply = out[0, ids.shape[1] :].tolist()
        tokenizer.decode(reply, skip_special_tokens=True)
        return Reply(reply, first.at - began)

    return write


def llama_cpp(llm: LLM, setting: Setting) -> Write:
    """llama-cpp-python on the GGUF file, at the file's own precision."""
    library = _library("llama_cpp", "llama-cpp-python")
    lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding if setting.lookup else None
    model = library.Llama(
        model_path=str(_gguf(llm, "llama.cpp")),
        n_ctx=min(4096, llm.model.target.context_length),
        n_threads=setting.threads,
        n_threads_batch=setting.threads,
        draft_model=lookup(num_pred_tokens=setting.lookup) if lookup else None,
        verbose=False,
    )

    def write(text: str) -> Reply:
        began, first = time.perf_counter(), 0.0
        ids = model.tokenize(_prompt(llm, text).encode(), add_bos=False, special=True)
        reply: list[int] = []
        for token in model.generate(ids, temp=setting.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - began
            reply.append(token)
            if token in llm.model.eos or len(reply) == setting.tokens:
                break
        model.detokenize(reply)
        return Reply(reply, first)

    return write


def openvino(llm: LLM, setting: Setting) -> Write:
    """OpenVINO GenAI on the GGUF file, and its prompt lookup."""
    library = _library("openvino_genai", "openvino-genai")
    options: dict[str, Any] = {"prompt_lookup": True} if setting.lookup else {}
    options["INFERENCE_NUM_THREADS"] = setting.threads
    pipeline = library.LLMPipeline(str(_gguf(llm, "OpenVINO GenAI")), "CPU", **options)
    config = library.GenerationConfig()
    config.max_new_tokens = setting.tokens
    config.apply_chat_template = False
    config.do_sample = setting.temperature > 0
    if config.do_sample:
        config.temperature = setting.temperature
    if setting.lookup:
        config.num_assistant_tokens, config.max_ngram_size = setting.lookup, 3
    tokenizer = pipeline.get_tokenizer()

    def write(text: str) -> Reply:
        began, times = time.perf_counter(), []

        def note(words: str) -> bool:
            times.append(time.perf_counter() - began)
            return False

        result = pipeline.generate([_prompt(llm, text)], config, note)
        reply = tokenizer.encode(result.texts[0], add_special_tokens=False).input_ids.data[0].tolist()
        # Its text has no end-of-sequence token, which it wrote all the same where it stopped early.
        ended = [llm.model.eos[0]] if len(reply) < setting.tokens else []
        return Reply([*reply, *ended], times[0] if times else time.perf_counter() - began)

    return write


PEERS: dict[str, tuple[Peer, int]] = {
    "transformers": (transformers, 10),
    "llama.cpp": (llama_cpp, 10),
    "openvino": (openvino, 5),
}
"""Name -> how it is begun, and how long its prompt lookup drafts, as its documentation has it."""


def _prompt(llm: LLM, text: str) -> str:
    """The question as the model reads it, so that nobody's template differs."""
    if llm.tokenizer.chat_template is None:
        return text
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _library(name: str, packages: str) -> Any:
    if find_spec(name) is None:
        raise Missing(f"{name} is not installed", f"pip install {packages}")
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise Missing(f"{name} cannot be imported ({error})", f"pip install {packages}") from error


def _gguf(llm: LLM, name: str) -> Any:
    if llm.model.path.suffix != ".gguf":
        raise Missing(f"{name} reads the same file, and {llm.model.path} is no GGUF file", "Give a GGUF file")
    return llm.model.path
