"""Speculation inside transformers' own `generate`: `model.generate(**inputs, custom_generate=speculate())`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.factory import check_spec, open_drafter, to_tree
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption
from paceline.integrations.sequences import BatchSequence, Recorder, rows_of
from paceline.sampling.noise import Noise
from paceline.sampling.parameters import Sampling
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
    """Return a `custom_generate` for transformers' `generate` that speculates.

    Greedy text equals the text of `generate`, up to rounding. In bfloat16, passes that verify drafts round differently
    from passes with one row, so texts may diverge where two tokens are nearly equal. With drafter=None, `generate`'s
    own loop writes greedy text, which is then identical. Sampled text has the same distribution. It depends on a seed
    drawn from torch's generator, so `torch.manual_seed` makes it reproducible.

    All logits processors and stopping criteria of the call apply to every token. Their results must depend only on
    their arguments. `stop_strings` needs a tokenizer, which transformers does not pass on; use a `StopStringCriteria`
    instead. The model is set to eval().

    Args:
        drafter: As in `paceline.load`. "model:REF" also needs `tokenizer`.
        draft: As in `paceline.load`.
        tokenizer: The target's tokenizer, to compare vocabularies with a draft model.
        streamer: A streamer. Pass it here instead of to `generate`, which (in version 5.23) does not pass it on.

    Returns:
        A callable, `generate(..., custom_generate=speculate())`. It raises `InvalidOption` for options of `generate`
        that are not supported.

    Raises:
        InvalidOption: If there is no such drafter, or the tokenizer is missing.
    """
    check_spec(drafter)
    if isinstance(drafter, str) and "model:" in drafter and tokenizer is None:
        raise InvalidOption(f"{drafter!r} needs the target's tokenizer to compare vocabularies", "Pass tokenizer=...")
    return Speculator(drafter, to_tree(draft), tokenizer, streamer)


class Speculator:
    """The callable that `speculate` returns. It keeps the drafter and its state between calls.

    Attributes:
        stats: Statistics of the latest call, one for each sequence.
    """

    def __init__(
        self, drafter: str | Drafter | None, draft: DraftBudget | None, tokenizer: Any, streamer: BaseStreamer | None
    ) -> None:
        self._spec, self._draft, self._tokenizer, self._streamer = drafter, draft, tokenizer, streamer
        self._engine: Engine | None = None
        self._model: PreTrainedModel | None = None
        self.stats: list[Stats] = []

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
        """Generate the sequences of a call of transformers' `generate`.

        Args:
            model: The target.
            input_ids: Prompts, int64 [B, T], padded on the left.
            logits_processor: Processors of the call.
            stopping_criteria: Criteria of the call.
            generation_config: Config of the call.
            streamer: Receives the tokens.
            **model_kwargs: Arguments for the model.

        Returns:
            As `generate`.

        Raises:
            InvalidOption: If an option is not supported.
        """
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
        ends = any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria)
        pad = generation_config._pad_token_tensor if ends else None
        job = _GenerateCall(engine, rows, input_ids, generation_config, streamer, pad)
        self.stats = job.stats
        return job.run()

    def _undrafted(
        self, model: PreTrainedModel, input_ids: Tensor, *choice: Any, **rest: Any
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Run `generate`'s own loop, because passes of other sizes would round bfloat16 differently."""
        self.stats = [Stats(0, "bits") for _ in input_ids]
        out: Any = model._sample(input_ids, *choice, **rest)
        whole = out if isinstance(out, Tensor) else out.sequences
        for stats in self.stats:
            stats.rounds = stats.tokens = whole.shape[1] - input_ids.shape[1]
            stats.close()
        return out

    def _ready(self, model: PreTrainedModel) -> Engine:
        """Return the engine for this model. Reuse the engine of the last call if the model is the same."""
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
    """One call of `generate`, with a request for each sequence. All requests share the passes.

    `pad` is the token after the end of a sequence. It is None if there are no end-of-sequence tokens. Then transformers
    continues sequences that a criterion has stopped until all are stopped, and so does this class.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[BatchSequence],
        input_ids: Tensor,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        pad: Tensor | None,
    ) -> None:
        self._engine, self._rows, self._input_ids = engine, rows, input_ids
        self._config, self._streamer, self._pad = config, streamer, pad
        self._seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        self._samplers = [self._sampler(row) for row in rows]
        self._texts = [row.prompt for row in rows]
        """Prompt and reply so far of each sequence."""
        self.stats = [Stats(self._seed, "rounding") for _ in rows]
        self._put = 0

    def run(self) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate all sequences."""
        self._write([row.left for row in self._rows], criteria=True)
        longest = max(map(len, self._replies))
        if self._pad is None:
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
        """Continue every sequence that has tokens left until it ends."""
        tasks = {i: Task(partial(self._start, i, count, criteria)) for i, count in enumerate(left) if count}
        with Batch(self._engine, list(tasks.values()), len(tasks)) as batch:
            for _ in batch:
                for (
                    error
                ) in batch.errors.values():  # raise at once, while a batch would first finish the other sequences
                    raise error
                self._stream([i for i, task in tasks.items() if not task.done])

    def _start(self, index: int, left: int, criteria: bool, source: Request | None) -> Request:
        """Start the request of a sequence. Without `criteria`, it stops only after `left` tokens."""
        sampling = Sampling(max_new_tokens=left, stop_when=(self._rows[index].ended,) if criteria else ())
        stream = TextStream(sampling, (), lambda ids: "", left)
        request = self._engine.start(self._texts[index], self._samplers[index], stream, self.stats[index])
        self._texts[index] = request.token_ids
        return request

    def _stream(self, live: Sequence[int]) -> None:
        """Pass the tokens that all sequences have so far to the streamer, one [B] at a time, like `generate`."""
        if self._streamer is None:
            return
        replies = self._replies
        lengths = list(map(len, replies))
        done = min(lengths if self._pad is None else (lengths[i] for i in live), default=max(lengths))
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
            scores=self._steps([r.scores for r in recorders], width) if self._config.output_scores else None,
            logits=self._steps([r.logits for r in recorders], width) if self._config.output_logits else None,
        )

    def _steps(self, rows: Sequence[Mapping[int, Tensor]], width: int) -> tuple[Tensor, ...]:
        """Return [B, V] for each step, from rows [V] by sequence and position. Sequences that have ended get zeros."""
        none = torch.zeros_like(next(iter(rows[0].values())))
        steps = [
            [kept[at] for at in range(len(row.prompt), len(text))]
            for kept, row, text in zip(rows, self._rows, self._texts, strict=True)
        ]
        return tuple(torch.stack([row[i] if i < len(row) else none for row in steps]) for i in range(width))


def _fits(criteria: StoppingCriteriaList, engine: Engine) -> None:
    limit, room = criteria.max_length or 0, engine.target.context_length
    if limit > room:
        raise InvalidOption(
            f"a text of up to {limit} tokens exceeds the model's context length of {room} tokens",
            "Lower max_new_tokens",
        )


def refuse(config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    """Raise `InvalidOption` for options of a call that speculation does not support."""
    from transformers import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
    from transformers.cache_utils import DynamicCache
    from transformers.generation import GenerationMode

    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidOption(f"{mode.value} is not supported", "Use greedy decoding or sampling, with num_beams=1")
    for processor in processors:
        if isinstance(processor, (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)):
            raise InvalidOption(
                f"{type(processor).__name__} counts its calls, so it does not work with drafts",
                "Generate without custom_generate",
            )
    if config.output_attentions or config.output_hidden_states:
        raise InvalidOption(
            "output_attentions and output_hidden_states are not supported", "Call the model on the text to get them"
        )
    past = model_kwargs.get("past_key_values")
    # generate() creates an empty cache itself. Newer versions mark a cache that the user passed.
    own = past is not None and (getattr(past, "_is_user_defined", False) or past.get_seq_length() > 0)
    if own or type(past) not in (DynamicCache, type(None)):
        raise InvalidOption(f"your own cache ({type(past).__name__}) is not supported", "Leave out past_key_values")
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    if others := sorted(name for name in model_kwargs.keys() - known if model_kwargs[name] is not None):
        raise InvalidOption(
            f"not supported: {', '.join(others)}", "Leave them out, or generate without custom_generate"
        )
