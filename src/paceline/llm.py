"""The public face: load a model, generate, stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from paceline.accept import promise
from paceline.drafters.make import check_spec, make_drafter, to_tree
from paceline.engine import Engine, Request
from paceline.errors import InvalidPrompt, PacelineError, PromptTooLong
from paceline.exact import exactness
from paceline.models.loader import Device, DType, Loaded, load_model
from paceline.protocols import Drafter
from paceline.sampling import Sampling
from paceline.stats import Exact, Stats
from paceline.stream import Chunk, TextStream
from paceline.types import FinishReason, Tree

if TYPE_CHECKING:
    from paceline.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One chat message: {"role": ..., "content": ...}."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text (put through the chat template unless raw), token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `token_ids`: the reply's own, EOS included. `text`: theirs, up to a stop string."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_dict(),
        }


class Stream(Iterator[Chunk]):
    """A reply as it grows: iterate over its chunks; close it, or leave its `with` block, to stop early.

    `completion` is the reply so far, whole once the iteration has ended.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._prompt_tokens = len(request.text)
        self._ready: list[Chunk] = []
        self._texts: list[str] = []
        self._prefilled = False
        self._cut = False

    def __next__(self) -> Chunk:
        try:
            while not self._ready:
                if self._request.finish:
                    self.close()
                    raise StopIteration
                self._advance()
        except BaseException as error:
            self.close()
            if isinstance(error, PacelineError):
                error.partial = self.completion
            raise
        chunk = self._ready.pop(0)
        self._texts.append(chunk.text)
        return chunk

    def _advance(self) -> None:
        if not self._prefilled:
            self._engine.prefill(self._request)
            self._prefilled = True
        self._ready = self._engine.step([self._request])[0]

    def close(self) -> None:
        """End the reply here. The model is ready for the next prompt; closing twice does nothing."""
        if not self._request.closed:
            self._engine.finish(self._request)
            self._request.stats.close()
            self._cut = bool(self._ready)
            self._ready = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """What has been handed out so far, as a completion."""
        shown = self._request.text[self._prompt_tokens :][: len(self._texts)]
        ended = None if self._ready or self._cut else self._request.finish
        return Completion("".join(self._texts), shown, ended or "cancelled", self._request.stats, self._prompt_tokens)


class LLM:
    """A target model, its tokenizer and a drafter, ready to write."""

    def __init__(self, model: Loaded, drafter: Drafter | None = None, draft: Tree | None = None) -> None:
        """See `load`, which makes one from names. Several may share a loaded model."""
        self.model = model
        self.engine = Engine(model.target, drafter, draft)

    @cached_property
    def exact(self) -> Exact:
        """Whether speculation keeps the text bit for bit on this machine, or up to rounding."""
        return exactness(self.model.target)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def sampling(self, **changes: Any) -> Sampling:
        """The sampling that the model's own `generation_config` recommends, with changes."""
        known = ("temperature", "top_k", "top_p", "min_p")
        own = {key: self.model.generation[key] for key in known if self.model.generation.get(key) is not None}
        if not self.model.generation.get("do_sample", bool(own.get("temperature"))):
            own = {}
        return Sampling(**(own | changes))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> Completion:
        """Write one reply. `on_chunk` sees every chunk as it comes; if it returns False, the reply ends there.

        `raw`: text goes to the model as it is, without the chat template. Raises `PacelineError`.
        """
        with self.stream(prompt, sampling, raw=raw) as stream:
            for chunk in stream:
                if on_chunk is not None and on_chunk(chunk) is False:
                    break
        return stream.completion

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, *, raw: bool = False) -> Stream:
        """Write one reply chunk by chunk, a chunk per token. Nothing is computed before the first is asked for."""
        sampling = sampling or Sampling()
        tokens = self.encode(prompt, raw=raw)
        room = self.model.target.context_length - len(tokens)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the model's context {self.model.target.context_length}",
                "Shorten the prompt",
            )
        sampler = sampling.sampler(tokens)
        text = TextStream(sampling, self.model.eos, self.tokenizer.decode, room)
        return Stream(
            self.engine, self.engine.start(sampler, text, Stats(sampler.noise.seed, promise(sampler, self.exact)))
        )

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The prompt's token ids. Raises `InvalidPrompt` for an empty or malformed one."""
        tokens = self._encode(prompt, raw)
        if not tokens:
            raise InvalidPrompt("the prompt is empty", "Give at least one token of text")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.model.target.vocab_size:
                raise InvalidPrompt(
                    f"prompt token {token!r} is not a token id", f"Ids go from 0 to {self.model.target.vocab_size - 1}"
                )
        return tokens

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt or raw or self.tokenizer.chat_template is None:
                return self.tokenizer.encode(prompt) if prompt else []
            prompt = [{"role": "user", "content": prompt}]
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.encode(self.tokenizer.apply_chat_template(items), special=False)
        return items


def load(
    model: str | Path = "demo",
    *,
    drafter: str | Drafter | None = "auto",
    draft: int | Tree | Literal["auto"] = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    revision: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: bool = False,
) -> LLM:
    """Load a target model and a drafter.

    model: "demo", a folder in Hugging Face layout, a GGUF file, or a hub id (with `revision` and `token`).
    drafter: None, "auto" (the best one there is for this model), "ngram", "suffix", "model:REF" (a small model of
    the same vocabulary), several joined by "+" (the first with something to say drafts), or a `Drafter`.
    draft: how much to draft per round: a length, a `Tree`, or "auto".
    dtype: "auto", "float32", "bfloat16" or "float16". device: "auto", "cpu", "cuda" or "mps".
    allow_pickle: read `pytorch_model.bin` where there are no safetensors (weights only).
    progress: show bars for download and load on stderr.

    Raises `PacelineError`: what is wrong and what to do about it.
    """
    budget = to_tree(draft)
    check_spec(drafter)
    loaded = load_model(
        model,
        dtype=dtype,
        device=device,
        revision=revision,
        token=token,
        allow_pickle=allow_pickle,
        progress=progress,
    )

    def load_draft(reference: str) -> Loaded:
        return load_model(reference, dtype=dtype, device=device, token=token, progress=progress)

    llm = LLM(loaded, make_drafter(drafter, loaded, load_draft), budget)
    _ = llm.exact  # the self-check belongs to loading, not to the first reply
    return llm
