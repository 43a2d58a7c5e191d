"""Speculation inside transformers' own `generate`: `model.generate(**inputs, custom_generate=speculate())`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.factory import check_spec, open_drafter, to_tree
from paceline.engine.engine import Engine, Request
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption
from paceline.integrations.sequences import BatchSequence, Recorder, Stops, rows_of
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Sampler
from paceline.types import DraftBudget

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.streamers import BaseStreamer

    from paceline.models.transformers import CausalLM


def speculate(
    drafter: str | Drafter | None = "auto",
    *,
    draft: int | DraftBudget | Literal["auto"] = "auto",
    tokenizer: Any = None,
    streamer: BaseStreamer | None = None,
) -> Speculator:
    """A `custom_generate` that writes what `generate` writes, with drafts.

    drafter, draft: as in `paceline.load`; "model:REF" also needs the target's `tokenizer`, to compare vocabularies.
    streamer: give it here and not to `generate`, which (in 5.23) hands it on to no callable.

    Greedy text is `generate`'s own, up to rounding where two tokens are nearly equal: in bfloat16, passes that verify
    drafts round differently from passes of one row, so texts may part after a while. With drafter=None greedy text is
    written by `generate`'s own loop, and is identical. Sampled text has the same distribution and is a function of a
    seed drawn from torch's generator: `torch.manual_seed` repeats it. Every logits processor and stopping criterion of
    the call applies to every token; they must be functions of their arguments. (`stop_strings` needs a tokenizer, which
    transformers does not hand on either: give a `StopStringCriteria`.)

    The model is set to eval(). Raises `InvalidOption` for a drafter that does not exist and, when called, for what
    cannot be drafted.
    """
    check_spec(drafter)
    if isinstance(drafter, str) and "model:" in drafter and tokenizer is None:
        raise InvalidOption(f"{drafter!r} is compared with the target's vocabulary", "Give tokenizer=... too")
    return Speculator(drafter, to_tree(draft), tokenizer, streamer)


class Speculator:
    """What `speculate` returns. Keeps the drafter, and so what it remembers, from call to call."""

    def __init__(
        self, drafter: str | Drafter | None, draft: DraftBudget | None, tokenizer: Any, streamer: BaseStreamer | None
    ) -> None:
        self._spec, self._draft, self._tokenizer, self._streamer = drafter, draft, tokenizer, streamer
        self._engine: Engine | None = None
        self._model: PreTrainedModel | None = None
        self.stats: list[Stats] = []
        """Of the latest call, one per sequence."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """See transformers' `generate`, which calls it. `input_ids`: int64 [B, T], padded on the left."""
        from transformers.generation import EosTokenCriteria

        refuse(generation_config, logits_processor, model_kwargs)
        rows = rows_of(input_ids, model_kwargs, logits_processor, stopping_criteria)
        engine = self._ready(model)
        _fits(stopping_criteria, engine)
        if streamer is None and self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        streamer = streamer or self._streamer
        if self._spec in (None, "none") and not generation_config.do_sample:
            choice = (logits_processor, stopping_criteria, generation_config)
            return self._undrafted(model, input_ids, *choice, streamer=streamer, **model_kwargs)
        job = _GenerateCall(engine, rows, input_ids, generation_config, streamer)
        self.stats = job.stats
        ends = any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria)
        return job.run(generation_config._pad_token_tensor if ends else None)

    def _undrafted(
        self, model: PreTrainedModel, input_ids: Tensor, *choice: Any, **rest: Any
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`generate`'s own loop. Passes of other sizes than its own would round bfloat16 differently."""
        self.stats = [Stats(0, "bits") for _ in input_ids]
        out: Any = model._sample(input_ids, *choice, **rest)
        whole = out if isinstance(out, Tensor) else out.sequences
        for stats in self.stats:
            stats.rounds = stats.tokens = whole.shape[1] - input_ids.shape[1]
            stats.close()
        return out

    def _ready(self, model: PreTrainedModel) -> Engine:
        """The engine for this model: the one of the last call, if it was the same."""
        from paceline.models.transformers import CausalLM

        if self._engine is None or self._model is not model:
            target = CausalLM(model)
            self._engine, self._model = Engine(target, self._drafter(target), self._draft), model
        self._model.eval()
        return self._engine

    def _drafter(self, target: CausalLM) -> Drafter | None:
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import WordLevel

        from paceline.text.tokenizer import Tokenizer

        words = Tokenizer(Backend(WordLevel({}, "")))
        if self._tokenizer is not None:
            words = Tokenizer.from_transformers(self._tokenizer)
        loaded = Loaded(target, words, (), {}, Path(target.model.name_or_path))
        return open_drafter(self._spec, loaded)


class _GenerateCall:
    """One call of `generate`: a request per sequence, all in the same passes."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[BatchSequence],
        input_ids: Tensor,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self._engine, self._rows, self._input_ids = engine, rows, input_ids
        self._config, self._streamer = config, streamer
        self._seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        self._samplers = [self._sampler(row) for row in rows]
        self._texts = [row.prompt for row in rows]
        """Prompt and reply so far of every sequence."""
        self.stats = [Stats(self._seed, "rounding") for _ in rows]
        self._pad: Tensor | None = None
        self._put = 0

    def run(self, pad: Tensor | None) -> Tensor | GenerateDecoderOnlyOutput:
        """`pad`: what follows the end of a sequence. Where nothing is an end of sequence, transformers lets those that
        a criterion stopped run on until all are."""
        self._pad = pad
        self._write([row.left for row in self._rows], criteria=True)
        longest = max(map(len, self._replies))
        if pad is None:
            self._write([longest - len(reply) for reply in self._replies], criteria=False)
        self._stream(())
        if self._streamer is not None:
            self._streamer.end()
        return self._result()

    @property
    def _replies(self) -> list[list[int]]:
        return [text[len(row.prompt) :] for text, row in zip(self._texts, self._rows, strict=True)]

    def _sampler(self, row: BatchSequence) -> Sampler:
        config = self._config
        keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        return (Recorder if keeps else Sampler)(
            temperature=1.0 if config.do_sample else 0.0,
            noise=Noise(self._seed, row.index),
            processors=(row.process,),
        )

    def _write(self, left: Sequence[int], criteria: bool) -> None:
        """Go on with every sequence that has tokens left, until each has ended."""
        requests: list[Request] = []
        try:
            for i, (row, count) in enumerate(zip(self._rows, left, strict=True)):
                if count:
                    stops = Stops(row, count, criteria)
                    request = self._engine.start(self._texts[i], self._samplers[i], stops, self.stats[i])
                    requests.append(request)
                    self._texts[i] = request.token_ids
                    self._engine.prefill(request)
            while live := [r for r in requests if not r.finish]:
                self._engine.step(live)
                for request in live:
                    if request.error:
                        raise request.error
                    if request.finish:
                        self._engine.finish(request)
                self._stream([r.token_ids for r in requests if not r.finish])
        finally:
            for request in requests:
                self._engine.finish(request)
                request.stats.close()
        for sampler, reply in zip(self._samplers, self._replies, strict=True):
            if isinstance(sampler, Recorder):
                sampler.cut(len(reply))

    def _stream(self, live: Sequence[list[int]]) -> None:
        """Hand over the tokens that every sequence has by now, one [B] after the other, as `generate` does."""
        if self._streamer is None:
            return
        replies = self._replies
        open_ = [self._pad is None or any(text is one for one in live) for text in self._texts]
        lengths = list(map(len, replies))
        done = min((n for n, waits in zip(lengths, open_, strict=True) if waits), default=max(lengths))
        for at in range(self._put, done):
            self._streamer.put(torch.tensor([self._token(reply, at) for reply in replies]))
        self._put = max(self._put, done)

    def _token(self, reply: Sequence[int], at: int) -> int:
        return reply[at] if at < len(reply) or self._pad is None else int(self._pad)

    def _result(self) -> Tensor | GenerateDecoderOnlyOutput:
        replies = self._replies
        width = max(map(len, replies))
        new = torch.tensor([[self._token(reply, at) for at in range(width)] for reply in replies])
        sequences = torch.cat([self._input_ids, new.to(self._input_ids)], dim=-1)
        if not self._config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        recorders = [s for s in self._samplers if isinstance(s, Recorder)]
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_steps([r.scores for r in recorders], width) if self._config.output_scores else None,
            logits=_steps([r.logits for r in recorders], width) if self._config.output_logits else None,
        )


def _steps(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    """From [V] by sequence and step to [B, V] by step; zeros where a sequence has ended."""
    none = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[at] if at < len(row) else none for row in rows]) for at in range(width))


def _fits(criteria: StoppingCriteriaList, engine: Engine) -> None:
    limit, room = criteria.max_length or 0, engine.target.context_length
    if limit > room:
        raise InvalidOption(
            f"a text of up to {limit} tokens does not fit the model's context of {room}", "Give fewer max_new_tokens"
        )


def refuse(config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    """Raises `InvalidOption` for what a call asks and a draft cannot keep to."""
    from transformers import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
    from transformers.cache_utils import DynamicCache
    from transformers.generation import GenerationMode

    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidOption(f"{mode.value} is not drafted", "Ask for greedy text or sampling (num_beams=1)")
    for processor in processors:
        if isinstance(processor, (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)):
            raise InvalidOption(
                f"{type(processor).__name__} counts its calls and cannot look at drafts", "Generate without drafts"
            )
    if config.output_attentions or config.output_hidden_states:
        raise InvalidOption("drafted generation returns no attentions or hidden states", "Ask the model for them")
    past = model_kwargs.get("past_key_values")
    # generate() makes an empty cache itself; newer versions mark the one that a user gave.
    own = past is not None and (getattr(past, "_is_user_defined", False) or past.get_seq_length() > 0)
    if own or type(past) not in (DynamicCache, type(None)):
        raise InvalidOption(
            f"a cache of one's own ({type(past).__name__}) is neither read nor filled", "Leave past_key_values out"
        )
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    if others := sorted(name for name in model_kwargs.keys() - known if model_kwargs[name] is not None):
        raise InvalidOption(f"drafted generation takes no {', '.join(others)}", "Generate without drafts")
