"""Other programs that run the same weights: transformers, llama.cpp (its library and its server), OpenVINO GenAI.

Each program runs in its own process (`peer_process.py`), reads the same file with its default settings, tokenises the
same rendered prompt and stops at the same tokens. It must not remember anything from an earlier prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.bench.measure import FirstTokenTimer, MeasuredReply
from paceline.errors import PacelineError


class PeerUnavailable(PacelineError):
    """A peer is not installed, or cannot read this model."""


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """Setup of a peer.

    Attributes:
        path: Path of the model.
        eos: Token ids that end a reply.
        tokens: Maximum number of new tokens per reply.
        positions: Context length for the longest prompt and its reply.
        threads: CPU threads.
        device: Device, named as in torch.
        draft: Path of a draft model, or "".
    """

    path: str
    eos: tuple[int, ...]
    tokens: int
    positions: int
    threads: int
    device: str = "cpu"
    draft: str = ""


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A rendered prompt.

    Attributes:
        prompt: Text after the chat template.
        temperature: 0 is greedy.
        drafter: Drafter of the program, or "" for none.
        seed: Seed of sampling.
    """

    prompt: str
    temperature: float = 0.0
    drafter: str = ""
    seed: int = 0


PeerAnswer = Callable[[PeerPrompt], MeasuredReply]

PEERS: dict[str, str] = {
    "transformers": f"{__name__}:transformers",
    "llama.cpp": f"{__name__}:llama_cpp",
    "llama-server": "paceline.bench.llama_server:llama_server",
    "openvino": f"{__name__}:openvino",
}
"""Name -> function that starts the peer (`PeerSetup` -> `PeerAnswer`), as module:function."""

LOOKUP = "lookup"


def peer_drafters(name: str, draft: str) -> tuple[str, ...]:
    """Return the drafters of a program to measure. `draft` is the path of a draft model, or ""."""
    if name != "llama-server":
        return (LOOKUP,)
    return ("ngram-mod", "ngram-simple", *(("draft",) if draft else ()))


class Transformers:
    """A dense model and its tokenizer with transformers' defaults: sdpa attention, dynamic KV cache."""

    lookup = 10
    """Draft length of prompt lookup, as in transformers' documentation."""

    def __init__(self, path: Path, dtype: Any, device: str = "cpu") -> None:
        """Load a model. A GGUF file takes about 20 s, since transformers converts it tensor by tensor."""
        self.library = _library("transformers", "transformers accelerate")
        self.library.logging.disable_progress_bar()
        # Its warning about packed weights does not apply here, as `_check_dense` verifies.
        self.library.logging.set_verbosity_error()
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        dense: dict[str, Any] = {}
        if path.is_file():
            _library("accelerate", "accelerate")
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
            # Newer versions keep some GGUF weights packed, which is slow on a CPU and would make Paceline look better.
            if hasattr(self.library, "GgufConfig"):
                dense = {"quantization_config": self.library.GgufConfig(dequantize=True)}
        self.tokenizer = self.library.AutoTokenizer.from_pretrained(**where)
        model = self.library.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **dense)
        self.model = model.eval().to(device)
        _check_dense(self.model, dtype)

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        return list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def generate(self, ids: list[int], count: int, eos: tuple[int, ...], **options: Any) -> Any:
        """Call `generate`. `options` are fields of its GenerationConfig; without any, decoding is greedy."""
        streamer = options.pop("streamer", None)
        choices = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": count} | options
        config = self.library.GenerationConfig(eos_token_id=sorted(eos), pad_token_id=min(eos), **choices)
        torch = import_module("torch")
        prompt = torch.tensor([ids], device=self.model.device)
        with torch.inference_mode():
            return self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=streamer
            )


def transformers(setup: PeerSetup) -> PeerAnswer:
    """Start transformers: `generate` in bfloat16, and its prompt lookup."""
    torch = import_module("torch")
    torch.set_num_threads(setup.threads)
    peer = Transformers(Path(setup.path), torch.bfloat16, setup.device)

    def answer(prompt: PeerPrompt) -> MeasuredReply:
        timer = FirstTokenTimer()
        ids = peer.encode(prompt.prompt)
        options: dict[str, Any] = {"prompt_lookup_num_tokens": peer.lookup} if prompt.drafter else {}
        if prompt.temperature:
            torch.manual_seed(prompt.seed)
            options |= {"do_sample": True, "temperature": prompt.temperature, "top_k": 0, "top_p": 1.0}
        out = peer.generate(ids, setup.tokens, setup.eos, streamer=_TransformersStreamer(timer), **options)
        reply = out[0, len(ids) :].tolist()
        peer.tokenizer.decode(reply, skip_special_tokens=True)
        return MeasuredReply(reply, timer.seconds)

    return answer


def llama_cpp(setup: PeerSetup) -> PeerAnswer:
    """Start llama-cpp-python with the GGUF file, at the file's precision, and prompt lookup of 10 tokens."""
    library = _library("llama_cpp", "llama-cpp-python")
    path = gguf(setup, "llama.cpp")

    @cache
    def model(lookup: bool) -> Any:
        drafting = import_module("llama_cpp.llama_speculative")
        return library.Llama(
            model_path=path,
            n_ctx=setup.positions + 64,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            draft_model=drafting.LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None,
            verbose=False,
        )

    def answer(prompt: PeerPrompt) -> MeasuredReply:
        llama = model(bool(prompt.drafter))
        timer = FirstTokenTimer()
        llama.reset()  # otherwise it would reuse the common prefix of two prompts
        ids = llama.tokenize(prompt.prompt.encode(), add_bos=False, special=True)
        reply: list[int] = []
        sampling = {"temp": prompt.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in llama.generate(ids, **sampling):
            timer.mark()
            reply.append(token)
            if token in setup.eos or len(reply) == setup.tokens:
                break
        llama.detokenize(reply)
        return MeasuredReply(reply, timer.seconds)

    model(False)
    return answer


def openvino(setup: PeerSetup) -> PeerAnswer:
    """Start OpenVINO GenAI with the GGUF file, and prompt lookup of 5 tokens."""
    library = _library("openvino_genai", "openvino-genai")
    path = gguf(setup, "OpenVINO GenAI")

    class OpenVINOStreamer(library.StreamerBase):  # type: ignore[misc, name-defined]
        def __init__(self, timer: FirstTokenTimer) -> None:
            super().__init__()
            self.timer = timer

        def write(self, tokens: Any) -> Any:
            self.timer.mark()
            return library.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    @cache
    def pipeline(lookup: bool) -> Any:
        options: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
        # Use the default scheduler without its prefix cache, which would speed up repeated questions.
        options["scheduler_config"] = library.SchedulerConfig()
        options["scheduler_config"].max_num_batched_tokens = 2**31 - 1
        options["scheduler_config"].enable_prefix_caching = False
        return library.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=setup.threads, **options)

    def answer(prompt: PeerPrompt) -> MeasuredReply:
        writer, config = pipeline(bool(prompt.drafter)), library.GenerationConfig()
        config.max_new_tokens = setup.tokens
        config.apply_chat_template = False
        config.set_eos_token_id(setup.eos[0])
        config.stop_token_ids = set(setup.eos)
        config.do_sample = prompt.temperature > 0
        if config.do_sample:
            config.temperature, config.rng_seed = prompt.temperature, prompt.seed
        if prompt.drafter:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        timer = FirstTokenTimer()
        tokenizer = writer.get_tokenizer()
        ids = tokenizer.encode(prompt.prompt, add_special_tokens=False)
        result = writer.generate(ids, config, OpenVINOStreamer(timer))
        reply = list(result.tokens[0])
        tokenizer.decode(reply)
        return MeasuredReply(reply, timer.seconds)

    pipeline(False)
    return answer


class _TransformersStreamer:
    """Receives the prompt and then each new token from transformers."""

    def __init__(self, timer: FirstTokenTimer) -> None:
        self._timer, self._prompt = timer, True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._timer.mark()
        self._prompt = False

    def end(self) -> None:
        pass


def _library(name: str, packages: str) -> Any:
    fix = f"pip install {packages}"
    if find_spec(name) is None:
        raise PeerUnavailable(f"{name} is not installed", fix)
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise PeerUnavailable(f"{name} cannot be imported ({error})", fix) from error


def gguf(setup: PeerSetup, name: str) -> str:
    """Return the path of the model. Raise `PeerUnavailable` if it is not a GGUF file, or the device is not the CPU."""
    if not setup.path.endswith(".gguf"):
        raise PeerUnavailable(
            f"{name} must read the same file as Paceline, but {setup.path} is not a GGUF file", "Use a GGUF file"
        )
    if setup.device != "cpu":
        raise PeerUnavailable(
            f"{name} is compared only on the CPU, but the model is on {setup.device}", "Add --device cpu"
        )
    return setup.path


def _check_dense(model: Any, dtype: Any) -> None:
    """Refuse packed weights. A baseline that unpacks them in every pass would make Paceline look better."""
    linear = import_module("torch.nn").Linear
    for name, module in model.named_modules():
        if name.endswith("_proj") and (type(module) is not linear or module.weight.dtype != dtype):
            kind = type(module).__name__
            raise PeerUnavailable(
                f"transformers loaded {name} as {kind} instead of a dense {dtype} layer", "Use a dense model"
            )
