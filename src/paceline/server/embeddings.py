"""Vectors of texts: the mean of the model's last hidden states, with length 1."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.draft_policy import OFF
from paceline.engine.prompt_logprobs import PooledStates
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.server import options
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.schema_embeddings import EmbeddingsRequest, OllamaEmbedRequest
from paceline.server.worker import ReplyJob, ServerStopping

_MOST_TEXTS = 128
"""Texts of one request; more may not fit into the queue."""


@dataclass(frozen=True, slots=True)
class EmbeddingJobs:
    """A job for each text, and what collects its states. `size`: numbers of each vector; None: all. `packed`: they are
    sent in base64."""

    jobs: Sequence[ReplyJob]
    states: Sequence[PooledStates]
    size: int | None
    packed: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(job.prompt_tokens for job in self.jobs)

    def vectors(self) -> list[list[float]]:
        """Return the vectors, once all jobs are over. Raises `ServerStopping` if the server stopped before, and
        `ApiError` 400 for more dimensions than there are."""
        for job, states in zip(self.jobs, self.states, strict=True):
            if states.count < job.prompt_tokens:
                raise ServerStopping
        found = [states.vector(self.size) for states in self.states]
        _check_size(self.size, len(found[0]))
        return found


def prepare(model: LoadedModel, settings: Settings, body: EmbeddingsRequest | OllamaEmbedRequest) -> EmbeddingJobs:
    """Return the jobs of a request. Raises `ApiError` 400."""
    llm = model.llm
    if isinstance(llm.model.target, Decoder):  # others show the size of their states when these are there
        _check_size(body.dimensions, llm.model.target.config.hidden)
    cut = isinstance(body, OllamaEmbedRequest) and body.truncate is not False
    texts = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
    if len(texts) > _MOST_TEXTS:
        raise bad_request(f"input must have at most {_MOST_TEXTS} texts, got {len(texts)}", "input")
    sampling = llm.sampling(max_new_tokens=0).seeded()
    jobs, states = [], []
    for i, text in enumerate(texts):
        param = "input" if text is body.input else f"input.{i}"
        tokens = _tokens(llm, settings, text, param, cut)
        states.append(PooledStates())
        # A prompt's last token is left to the first round, and there is none: so one more.
        padded = [*tokens, tokens[-1]]
        jobs.append(ReplyJob(padded, sampling, speculation=OFF, scores=states[-1], prompt_only=True, padding=1))
    packed = isinstance(body, EmbeddingsRequest) and body.encoding_format == "base64"
    return EmbeddingJobs(jobs, states, body.dimensions, packed)


def _check_size(size: int | None, most: int) -> None:
    if size and size > most:
        raise bad_request(f"dimensions must be <= {most}, the model's, got {size}", "dimensions")


def _tokens(llm: LLM, settings: Settings, text: Any, param: str, cut: bool) -> list[int]:
    limit = options.prompt_limit(llm, settings)
    if cut and llm.tokenizer.max_token_chars is not None:
        text = text[: limit * llm.tokenizer.max_token_chars]
    if not cut:
        options.check_length(llm, settings, text, param)
    tokens = options.token_ids(llm, text, param)[: limit if cut else None]
    options.check_length(llm, settings, tokens, param)
    return tokens


def openai(name: str, done: EmbeddingJobs, _: float) -> dict[str, Any]:
    """Return the answer in OpenAI's shape."""
    shown = _packed if done.packed else list
    data = [{"object": "embedding", "index": i, "embedding": shown(x)} for i, x in enumerate(done.vectors())]
    usage = {"prompt_tokens": done.num_tokens, "total_tokens": done.num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def ollama(name: str, done: EmbeddingJobs, seconds: float) -> dict[str, Any]:
    """Return the answer in Ollama's shape. `seconds`: what the request took."""
    times = {"total_duration": int(1e9 * seconds), "load_duration": 0, "prompt_eval_count": done.num_tokens}
    return {"model": name, "embeddings": done.vectors(), **times}


def ollama_prompt(_: str, done: EmbeddingJobs, __: float) -> dict[str, Any]:
    """Return the answer for one text in Ollama's older shape."""
    return {"embedding": done.vectors()[0]}


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
