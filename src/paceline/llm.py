"""The public API: load a model, generate, stream, batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from paceline.checkpoints.adapters import Adapter, check_adapters
from paceline.checkpoints.loader import Device, DType, Loaded
from paceline.checkpoints.targets import load_target, with_preset
from paceline.drafters.base import Drafter
from paceline.drafters.factory import check_specs, load_drafters, spec_name, to_tree
from paceline.drafters.trimmed import DraftVocab, check_draft_vocab
from paceline.engine.detokenizer import Chunk, TextStream
from paceline.engine.draft_policy import Speculation, shown_name
from paceline.engine.engine import Engine
from paceline.engine.prediction import predicted_ids
from paceline.engine.prompt_logprobs import PromptReader
from paceline.engine.request import Request
from paceline.engine.results import Batch, Completion, Stream
from paceline.engine.scheduler import Task
from paceline.engine.self_check import check_exact
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption, InvalidPrompt, PromptTooLong
from paceline.files.garbage import uncollected
from paceline.kernels.quantize import Precision, check_precision
from paceline.models.placement import DeviceMap
from paceline.recording.file import ReplyRecorder
from paceline.sampling.parameters import Sampling, Vocabulary, changed, recommended
from paceline.session import Session
from paceline.text.prompt_ids import encode_prompt
from paceline.text.sandbox import SANDBOX
from paceline.types import DraftBudget, Guarantee, Prompt
from paceline.verify.rules import text_guarantee

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from paceline.text.tokenizer import Tokenizer


class LLM:
    """A target model, its tokenizer and its drafters."""

    def __init__(
        self,
        model: Loaded,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        draft: DraftBudget | None = None,
        adapters: Mapping[str, str | None] | None = None,
    ) -> None:
        """Usually made by `load`. Several may share a loaded model. `drafter`: one drafter, or several by name, of
        which a request names one (`start`); the first is the default. `adapters`: by name, with the default drafter of
        their requests (None: that of the others)."""
        self.model = model
        self.engine = Engine(model.target, drafter, draft)
        self.draft, self.adapters = draft, {**dict.fromkeys(model.adapters), **(adapters or {})}
        self.adapter: str | None = None
        """The adapter of replies that name none."""
        self.recorder: ReplyRecorder | None = None
        self.source: dict[str, Any] | None = None
        """The arguments of the `load` that made this, if all can be read again."""

    def __repr__(self) -> str:
        return f"<LLM {self.name}: {self.model.path}>"

    @property
    def name(self) -> str:
        """Target, drafter, draft size and guarantee in one line for people: "smollm2 + suffix, draft auto, bits"."""
        drafting = f" + {shown_name(self.drafter)}, draft {self.draft or 'auto'}" if self.drafter != "none" else ""
        return f"{self.model.path.stem}{drafting}, {self.guarantee}"

    @property
    def guarantee(self) -> Guarantee:
        """Whether speculation keeps the text bit for bit on this machine, or up to rounding."""
        return self.engine.guarantee

    @property
    def drafter(self) -> str:
        """The name of the drafter that replies use by default, or "none"."""
        return self.engine.policies.default.drafter or "none"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, as sampling parameters need it."""
        encode, size = partial(self.tokenizer.encode, special=False), self.model.target.vocab_size
        return Vocabulary(size, self.model.eos, encode, self.tokenizer)

    def sampling(self, **changes: Any) -> Sampling:
        """Return the sampling that the model's `generation_config` recommends, with changes; greedy if it has none."""
        try:
            own = Sampling(**recommended(self.model.generation))
        except InvalidOption as error:
            raise InvalidOption(
                f"generation_config.json of {self.model.path} is invalid: {error.cause}", "Correct the file"
            ) from error
        return changed(own, changes)

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        on_chunk: Callable[[Chunk], object] | None = None,
        adapter: str | None = None,
        **changes: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        raw: bool = False,
        width: int = 32,
        on_chunk: Callable[[int, Chunk], object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **changes: Any,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int,
        raw: bool = False,
        width: int = 32,
        on_chunk: Callable[[int, Chunk], object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **changes: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        sampling: Any = None,
        *,
        n: int | None = None,
        raw: bool = False,
        width: int = 32,
        on_chunk: Callable[..., object] | None = None,
        adapter: Any = None,
        **changes: Any,
    ) -> Any:
        """Write one reply; or, for a list of prompts (see `batch`) or with `n`, a list of replies.

        `sampling`: used as given; without one, what the model recommends (`LLM.sampling`). `changes`: single sampling
        parameters that override either, such as `max_new_tokens=64, temperature=0.7`.
        `on_chunk`: called with every chunk as it is written, of several replies with (index of the reply, chunk); where
        it returns False, that reply ends. `raw`: give text to the model as it is, without the chat template. `adapter`:
        the name of one of `load(adapters=...)`, or a list with one or None for each prompt. Raises `PacelineError`.
        """
        # One prompt may itself be a list: of ids or of messages.
        several = isinstance(prompt, (list, tuple)) and any(isinstance(one, (str, list, tuple)) for one in prompt)
        if several or n is not None:
            prompts, count = prompt if several else [prompt], 1 if n is None else n
            with self.batch(prompts, sampling, n=count, raw=raw, width=width, adapter=adapter, **changes) as batch:
                for index, chunk in batch:
                    if on_chunk is not None and on_chunk(index, chunk) is False:
                        batch.stop(index)
            return batch.completions
        with self.stream(prompt, sampling, raw=raw, adapter=adapter, **changes) as stream:
            for chunk in stream:
                if on_chunk is not None and on_chunk(chunk) is False:
                    break
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        adapter: str | None = None,
        **changes: Any,
    ) -> Stream:
        """Write one reply chunk by chunk, one per token, and none before it is requested. Arguments: see `generate`."""
        sampling = self._sampling(sampling, changes)
        return Stream(self.engine, self.start(self.prompt_ids(prompt, raw=raw), sampling, adapter=adapter))

    def batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        raw: bool = False,
        width: int = 32,
        adapter: str | Sequence[str | None] | None = None,
        **changes: Any,
    ) -> Batch:
        """Write many replies together: an iterator over (index, chunk), whose `completions` are in the prompts' order.

        `sampling`: one for all, or one per prompt. `changes`: as for `generate`, applied to each.
        `n`: replies per prompt, adjacent in the results: samples 0 to n - 1 of its seed.
        `width`: maximum number of requests that share a pass; the others wait. `adapter`: see `generate`. Each reply is
        the one its prompt would get alone. Raises `PacelineError` for an invalid prompt or option before anything else.
        """
        if isinstance(prompts, str):
            raise InvalidPrompt("a batch is a list of prompts, and this is one text", "Give [text], or call generate")
        each = sampling if isinstance(sampling, (list, tuple)) else [sampling] * len(prompts)
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        for what, given in (("samplings", each), ("adapters", names)):
            if len(given) != len(prompts):
                raise InvalidOption(f"{len(prompts)} prompts have {len(given)} {what}", "Give one for all, or one each")
        if any(type(x) is not int or x < 1 for x in (n, width)):
            raise InvalidOption(f"n={n!r} replies per prompt, {width!r} at once, are not possible", "Give 1 or more")
        tasks = []
        for index, (prompt, how, name) in enumerate(zip(prompts, each, names, strict=True)):
            self.model.adapter_number(name)  # this and the sampler refuse what they must before anything begins
            seeded = self._sampling(how, changes).seeded()
            try:
                tokens = self.prompt_ids(prompt, raw=raw)
            except InvalidPrompt as error:
                where = f"prompt {index} of the batch: " if len(prompts) > 1 else ""
                raise type(error)(where + error.cause, error.fix) from error
            seeded.sampler(vocabulary=self.vocabulary)
            begin = partial(self.start, tokens, seeded, adapter=name)
            tasks += [Task(partial(begin, sample), group=index) for sample in range(n)]
        return Batch(self.engine, tasks, width)

    def _sampling(self, sampling: Any, changes: Mapping[str, Any]) -> Sampling:
        """Return the sampling of a reply requested with these arguments."""
        if sampling is None:
            return self.sampling(**changes)
        if not isinstance(sampling, Sampling):
            raise InvalidOption(
                f"sampling is a {type(sampling).__name__}", "Give a paceline.Sampling, or one per prompt"
            )
        return changed(sampling, changes)

    def start(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        sample: int = 0,
        source: Request | None = None,
        speculation: Speculation | None = None,
        scores: PromptReader | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Start a reply, for callers with a scheduler of their own (see `Engine.start`). `scores` collects
        log-probabilities or states of the prompt."""
        number = self.model.adapter_number(adapter := adapter or self.adapter)
        sampler, target = sampling.sampler(sample, self.vocabulary), self.model.target
        room = target.context_length - len(tokens)
        special = self.tokenizer.special_in("".join(sampling.reasoning)) if sampling.reasoning else None
        text = TextStream(sampling, self.model.eos, self.tokenizer.decode, room, special)
        how = speculation or self.speculation(adapter)
        stats = Stats(sampler.noise.seed, text_guarantee(sampler, self.guarantee), how.drafter, adapter)
        predicted: tuple[int, ...] = ()
        if sampling.prediction:
            predicted = predicted_ids(sampling.prediction, self.tokenizer.encode, room, target.vocab_size)
        request = self.engine.start(tokens, sampler, text, stats, None if scores else source, how, number)
        try:
            request.prompt_reader = scores
            if sampling.prediction:
                request.expect(predicted)
            if self.recorder and sampling.max_new_tokens:
                self.recorder.watch(request, sampling, sample)
        except BaseException:
            self.engine.finish(request)
            raise
        return request

    def speculation(self, adapter: str | None = None) -> Speculation:
        """Return the default speculation of requests with this adapter."""
        drafter = self.adapters.get(adapter or "")
        return Speculation(None if drafter == "none" else drafter) if drafter else self.engine.policies.default

    def record(self, path: str | Path) -> ReplyRecorder:
        """Append every reply from now on to a recording, to be closed. Raises `InvalidData`, and `OSError`."""
        self.recorder = ReplyRecorder(Path(path), self.model)
        return self.recorder

    def prompt_ids(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the ids of a prompt that leaves room for a reply. Raises `InvalidPrompt`, `PromptTooLong`."""
        tokens, limit = self.encode(prompt, raw=raw), self.model.target.context_length
        if len(tokens) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the model's context {limit}", "Shorten the prompt"
            )
        return tokens

    def session(self, *, adapter: str | None = None) -> Session:
        """Return a session: the target for a loop of your own (docs/how-to/own-loop.md). `adapter`: see `generate`."""
        number = self.model.adapter_number(adapter or self.adapter)
        return Session(self.model.target, self.model.eos, self.encode, self.tokenizer.decode, number)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the prompt's token ids. Raises `InvalidPrompt` for an empty or malformed one."""
        return encode_prompt(prompt, self.tokenizer, self.model.target.vocab_size, raw=raw)

    def quantize(self, mode: Precision, draft: Precision | None = None) -> None:
        """Hold the weights in another precision from now on; `draft`: those of the drafters too. See `load`.

        Both are read again from where they came, so that nothing is rounded twice; until then the old ones stay, and
        replies that have begun end with them. Raises `PacelineError`, and nothing has changed then.
        """
        if self.source is None or self.recorder or isinstance(self.source["drafter"], Drafter):
            raise InvalidOption(
                "objects and shared models keep their weights, and a recording its precision",
                "Load by name, in one process, unrecorded",
            )
        made = load(**{**self.source, "quantize": mode, "draft_quantize": draft or self.source["draft_quantize"]})
        self.model, self.engine, self.source = made.model, made.engine, made.source


@uncollected()
def load(
    model: str | Path | PreTrainedModel = "demo",
    *,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path | Adapter] | None = None,
    tokenizer: Tokenizer | PreTrainedTokenizerFast | None = None,
    drafter: str | Drafter | Sequence[str] | None = "auto",
    draft: int | DraftBudget | Literal["auto"] = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    quantize: Precision = "auto",
    draft_quantize: Precision = "auto",
    draft_vocab: DraftVocab = "auto",
    revision: str | None = None,
    draft_revision: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    exact: bool = False,
    preset: Literal["fast", "low-memory", "exact"] | None = None,
    tensor_parallel: bool = False,
    device_map: DeviceMap | None = None,
    draft_device_map: DeviceMap | None = None,
    chat_template: str | Path | None = None,
) -> LLM:
    """Load a target model and a drafter.

    model: "demo", a folder in Hugging Face layout, a GGUF file, a hub id (with `revision` and `token`), or a LoRA
    adapter in PEFT's layout, which names its base model itself; or a causal model or PeftModel already loaded,
    with its `tokenizer`: it stays on its device, in its own dtype, and is set to eval().
    adapter: a LoRA adapter, a folder or a hub id, to merge into the model. adapters: by name, those to hold beside it:
    each request may name its own. A `paceline.Adapter` adds up several, or has a drafter of its own.
    drafter: None, "auto" ("suffix"), "ngram", "suffix", "model:REF" (a small model; "model:REF@ADAPTER"), a head
    trained for the model ("eagle3:REF", "medusa:REF", "block:REF", "early-exit:REF", "head:REF" for any; "eagle3" or
    "medusa" alone comes with Paceline), "early-exit:LAYERS" ("early-exit:8@0.7" ends a chain below that probability),
    several joined by "+", or a `Drafter`. A list loads each of them, for requests that name theirs.
    draft: tokens to draft per round: a length, a `DraftBudget`, or "auto", which adapts to cost and acceptance.
    dtype: "auto", "float32", "bfloat16" or "float16". device: "auto", "cpu", "cuda" or "mps".
    quantize: "auto" runs a GGUF on its own codes, and other files as they are; "none" (or a dtype) asks for floats,
    "int8" and "int4" for integers (docs/how-to/quantize.md). `draft_quantize`: of a drafter; "auto" is 4 bits.
    draft_vocab: tokens that a draft model or EAGLE head chooses from: "auto" (of more than 65,536 the 49,152 lowest
    ids), a number (0: all), or a JSONL file of the model's own answers, whose most frequent tokens are taken.
    draft_revision: the `revision` of the drafter's hub id. progress: show bars on stderr for what takes more
    than two seconds (download, kernels, load); None: where it is a terminal.
    allow_pickle: read `pytorch_model.bin` (of a head `medusa_lm_head.pt`) where there are no safetensors.
    exact: load only if speculation keeps the text bit for bit (`LLM.guarantee`); on CUDA it takes slower kernels.
    preset: "fast", "low-memory" or "exact". tensor_parallel: share the target among the processes of torchrun.
    device_map: layers by device, as {"cuda:0": 20, "cpu": None} (the rest), or "auto". draft_device_map: a drafter's.
    chat_template: a jinja file, the name of one of the model's templates ("tool_use"), or a template, in place of the
    model's own.

    Raises `PacelineError`, which says what is wrong and what to do about it.
    """
    given = {**locals(), "progress": sys.stderr.isatty() if progress is None else progress}
    return _load(given if preset is None else with_preset(preset, given, signature(load)))


def _load(given: dict[str, Any]) -> LLM:
    """`load`, by all of its arguments."""
    SANDBOX.start()  # for the chat template; it starts while the model is read
    drafter, budget, beside = given["drafter"], to_tree(given["draft"]), check_adapters(given["adapters"] or {})
    own = {name: one.drafter and spec_name(one.drafter) for name, one in beside.items()}
    more = [*filter(None, own.values())]
    specs: list[Any] = [drafter] if isinstance(drafter, str | Drafter | None) else [*drafter]
    check_specs([*specs, *more], given["draft_quantize"])
    check_precision(given["quantize"])
    check_draft_vocab(given["draft_vocab"])
    loaded = load_target(given, beside)
    if given["chat_template"] is not None:
        loaded = replace(loaded, tokenizer=loaded.tokenizer.with_template(given["chat_template"]))
    llm = LLM(loaded, load_drafters(given, more, loaded), budget, own)
    if drafter in (None, "none"):
        llm.engine.policies.default = Speculation(None)
    llm.source = given if isinstance(given["model"], (str, Path)) and not given["tensor_parallel"] else None
    if given["exact"]:
        check_exact(llm.guarantee, loaded.target.device)
    return llm
