"""The public API: load a model, generate, stream, batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from paceline.cache.kv_types import KVType, check_kv_type
from paceline.checkpoints.adapters import Adapter, check_adapters
from paceline.checkpoints.load_arguments import LoadArguments
from paceline.checkpoints.loader import Device, DType, Loaded
from paceline.checkpoints.targets import load_target
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
from paceline.files.gc_pause import gc_paused
from paceline.kernels.quantize import Precision, check_precision
from paceline.models.placement import DeviceMap
from paceline.recording.file import ReplyRecorder
from paceline.sampling.parameters import Sampling, Vocabulary, changed, recommended
from paceline.session import Session
from paceline.text.chat_template import check_messages
from paceline.text.prompt_ids import encode_prompt
from paceline.text.sandbox import SANDBOX
from paceline.types import DraftBudget, Guarantee, Prompt
from paceline.verify.rules import text_guarantee
from paceline.vision.encoder import Vision
from paceline.vision.messages import has_images, split_images
from paceline.vision.tool_images import render_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from paceline.text.tokenizer import Tokenizer


class LLM:
    """A target model with its tokenizer and its drafters. Create one with `load`.

    Args:
        model: The loaded model. Several `LLM` objects may share it.
        drafter: A drafter, or several drafters by name. The first one is the default. A request may name another one
            (`start`).
        draft: The draft size. None chooses the size by cost and acceptance.
        adapters: Adapter -> the drafter that its requests use by default. None stands for the default drafter.

    Attributes:
        adapter: The adapter for replies that name no adapter.
        recorder: The recording that `record` started, or None.
    """

    def __init__(
        self,
        model: Loaded,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        draft: DraftBudget | None = None,
        adapters: Mapping[str, str | None] | None = None,
    ) -> None:
        self.model = model
        self.engine = Engine(model.target, drafter, draft)
        self.draft, self.adapters = draft, {**dict.fromkeys(model.adapters), **(adapters or {})}
        self.adapter: str | None = None
        self.recorder: ReplyRecorder | None = None
        self._arguments: LoadArguments | None = None
        """The arguments of `load`, if everything can be loaded again from them. Otherwise None."""

    def __repr__(self) -> str:
        return f"<LLM {self.name}: {self.model.path}>"

    @property
    def name(self) -> str:
        """Target, drafter, draft size and guarantee in one line, such as "smollm2 + suffix, draft auto, bits"."""
        drafting = f" + {shown_name(self.drafter)}, draft {self.draft or 'auto'}" if self.drafter != "none" else ""
        return f"{self.model.path.stem}{drafting}, {self.guarantee}"

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee for text with drafts on this machine: "bits" or "rounding" (see `types.Guarantee`)."""
        return self.engine.guarantee

    @property
    def drafter(self) -> str:
        """Name of the drafter that replies use by default, or "none"."""
        return self.engine.policies.default.drafter or "none"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def vision(self) -> Vision | None:
        """The model's vision tower. None if the model takes no images, or if Paceline cannot run its tower."""
        return self.model.vision

    def required_vision(self) -> Vision:
        """Return the model's vision tower. Raise `InvalidPrompt` if there is none."""
        if self.vision is None:
            raise InvalidPrompt(
                f"{self.model.path.name} reads text only, so it cannot take images",
                "Use a model that accepts images (see `paceline info MODEL`). A GGUF file needs its mmproj file",
            )
        return self.vision

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, in the form that sampling parameters need."""
        encode, size = partial(self.tokenizer.encode, special=False), self.model.target.vocab_size
        return Vocabulary(size, self.model.eos, encode, self.tokenizer)

    def sampling(self, given: Sampling | None = None, /, **changes: Any) -> Sampling:
        """Return sampling parameters with `changes`.

        Args:
            given: The parameters to change. The default is the recommendations in the model's `generation_config`, or
                greedy sampling if there are none.
            **changes: Individual sampling parameters.

        Raises:
            InvalidOption: If a change or the model's `generation_config` is invalid.
        """
        if given is None:
            try:
                given = Sampling(**recommended(self.model.generation))
            except InvalidOption as error:
                raise InvalidOption(
                    f"generation_config.json of {self.model.path} is invalid: {error.cause}", "Correct that file"
                ) from error
        if not isinstance(given, Sampling):
            raise InvalidOption(
                f"sampling must be a Sampling, got {type(given).__name__}",
                "Use paceline.Sampling(...), or one per prompt",
            )
        return changed(given, changes)

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
        """Generate a reply, or a list of replies for a list of prompts or if `n` is given.

        Args:
            prompt: A text, a list of messages or a list of token ids. A list of these is a batch.
            sampling: Sampling parameters. The default is the model's recommendations (`LLM.sampling`). A batch takes
                one value for all prompts, or one per prompt.
            n: Replies per prompt. If it is given, the result is a list. The replies to one prompt are adjacent: reply i
                to a prompt is sample i of the prompt's seed.
            raw: Pass the text to the model as it is, without the chat template.
            width: Maximum number of replies that share a pass.
            on_chunk: Called with every chunk as it is generated, or with (index of the reply, chunk) if the result is a
                list. Return False from it to end that reply.
            adapter: Name of one of the adapters of `load(adapters=...)`. A batch also takes a list, with a name or None
                for each prompt.
            **changes: Individual sampling parameters, such as `max_new_tokens=64`. They override `sampling`.

        Returns:
            A `Completion`, or a list of them.

        Raises:
            PacelineError: If a prompt or an option is invalid, or generation fails.
        """
        # A single prompt may itself be a list, of ids or of messages.
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
        """Return an iterator over the chunks of one reply, one per token. Tokens are generated only while the caller
        iterates.

        Args:
            prompt: A prompt, as for `generate`.
            sampling: Sampling parameters.
            raw: Skip the chat template.
            adapter: Name of an adapter.
            **changes: Individual sampling parameters.

        Raises:
            PacelineError: If the prompt or an option is invalid.
        """
        sampling = self.sampling(sampling, **changes)
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
        """Return an iterator over the chunks of many replies, as (index of the reply, chunk).

        Each reply is the same as if its prompt were the only one. `Batch.completions` holds the replies in the order of
        their prompts.

        Args:
            prompts: Prompts, each as for `generate`.
            sampling: Sampling parameters: one value for all prompts, or one per prompt.
            n: Replies per prompt. They are adjacent in the results: reply i to a prompt is sample i of the prompt's
                seed.
            raw: Skip the chat template.
            width: Maximum number of replies that share a pass. The others wait.
            adapter: Name of an adapter for all prompts, or a list with a name or None for each.
            **changes: Individual sampling parameters for all prompts. They override `sampling`.

        Raises:
            PacelineError: If a prompt or an option is invalid. In this case, no reply has started.
        """
        if isinstance(prompts, str):
            raise InvalidPrompt("batch() takes a list of prompts, not a single text", "Pass [text], or call generate()")
        each = sampling if isinstance(sampling, (list, tuple)) else [sampling] * len(prompts)
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        for what, given in (("samplings", each), ("adapters", names)):
            if len(given) != len(prompts):
                raise InvalidOption(
                    f"the number of {what} ({len(given)}) is not the number of prompts ({len(prompts)})",
                    "Pass one for all prompts, or one each",
                )
        for what, number in (("n", n), ("width", width)):
            if type(number) is not int or number < 1:
                raise InvalidOption(f"{what}={number!r} is not a positive integer", "Pass an integer of at least 1")
        tasks = []
        for index, (prompt, how, name) in enumerate(zip(prompts, each, names, strict=True)):
            self.model.adapter_number(name)  # check this and the sampler (below) before any reply starts
            seeded = self.sampling(how, **changes).seeded()
            try:
                tokens = self.prompt_ids(prompt, raw=raw)
            except InvalidPrompt as error:
                where = f"prompt {index} of the batch: " if len(prompts) > 1 else ""
                raise type(error)(where + error.cause, error.fix) from error
            seeded.sampler(vocabulary=self.vocabulary)
            begin = partial(self.start, tokens, seeded, adapter=name)
            tasks += [Task(partial(begin, sample), tokens, group=index) for sample in range(n)]
        return Batch(self.engine, tasks, width)

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
        """Start a reply, for callers that schedule rounds themselves. See `Engine.start`.

        Args:
            tokens: Token ids of the prompt.
            sampling: Sampling parameters.
            sample: Index of the sample, if one seed has several replies.
            source: A request with the same prompt, whose prefill this one may reuse.
            speculation: Drafter and draft size. None uses the adapter's default (`LLM.speculation`).
            scores: Collects the log-probabilities or hidden states of the prompt.
            adapter: Name of an adapter. None uses `LLM.adapter`.

        Raises:
            PacelineError: If an option is invalid.
        """
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
        """Return the drafter and draft size that requests with this adapter use by default."""
        drafter = self.adapters.get(adapter or "")
        return Speculation(None if drafter == "none" else drafter) if drafter else self.engine.policies.default

    def record(self, path: str | Path) -> ReplyRecorder:
        """Start appending every reply to a recording at `path`. The caller must close the recording.

        Raises:
            InvalidData: If the file is not a recording, or is a recording of another model.
            OSError: If the file cannot be opened.
        """
        self.recorder = ReplyRecorder(Path(path), self.model)
        return self.recorder

    def prompt_ids(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            InvalidPrompt: If the prompt is empty or malformed.
            PromptTooLong: If the prompt leaves no room for a reply in the model's context.
        """
        tokens, limit = self.encode(prompt, raw=raw), self.model.target.context_length
        if len(tokens) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, but the model's context has {limit}", "Shorten the prompt"
            )
        return tokens

    def session(self, *, adapter: str | None = None) -> Session:
        """Return a session, which runs the target for your own loop (docs/how-to/own-loop.md).

        Args:
            adapter: Name of an adapter. None uses `LLM.adapter`.
        """
        number = self.model.adapter_number(adapter or self.adapter)
        return Session(self.model.target, self.model.eos, self.encode, self.tokenizer.decode, number)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the token ids of a prompt of any length.

        Raises:
            InvalidPrompt: If the prompt is empty or malformed.
        """
        if has_images(prompt):
            vision, (chat, pictures) = self.required_vision(), split_images(prompt)  # type: ignore[arg-type]
            text, shown = render_images(vision, check_messages(chat), pictures, self.tokenizer.apply_chat_template)
            return vision.prompt(text, shown, partial(self.tokenizer.encode, special=False))
        return encode_prompt(prompt, self.tokenizer, self.model.target.vocab_size, raw=raw)

    def quantize(self, mode: Precision, draft: Precision | None = None) -> None:
        """Change the precision of the weights.

        The target and the drafters are read from their files again, so that no weight is rounded twice. The old weights
        stay in memory until the new ones are loaded, and replies that have already started finish with the old ones.

        Args:
            mode: Precision of the target: a value of the argument `quantize` of `load`.
            draft: Precision of the drafters. None keeps their precision.

        Raises:
            PacelineError: If the model cannot be quantised or read again. In this case, the object is unchanged.
        """
        arguments = self._arguments
        if arguments is None or self.recorder or isinstance(arguments.drafter, Drafter):
            raise InvalidOption(
                "quantize() is not available for model objects, drafter objects, tensor-parallel models, or while "
                "recording",
                "Load model and drafter by name, in one process, without recording",
            )
        made = _load(replace(arguments, quantize=mode, draft_quantize=draft or arguments.draft_quantize))
        self.model, self.engine, self._arguments = made.model, made.engine, made._arguments


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
    kv_type: KVType = "auto",
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
    prefix_memory: float = 1.0,
    prefix_dir: str | Path | None = None,
    prefix_disk: float = 8.0,
    mmproj: str | Path | None = None,
) -> LLM:
    """Load a target model and its drafter.

    Args:
        model: "demo", a folder in Hugging Face layout, a GGUF file, a hub id, or a LoRA adapter in PEFT's layout, which
            names its own base model. It may also be a loaded causal model of transformers or a loaded PeftModel. Such a
            model needs `tokenizer`, keeps its device and dtype, and is set to eval().
        adapter: A LoRA adapter, as a folder or hub id, to merge into the model.
        adapters: LoRA adapters by name. Each request may choose one. Use a `paceline.Adapter` to combine several
            adapters, or to give an adapter its own drafter.
        tokenizer: The tokenizer for a model object. All other models come with their own tokenizer.
        drafter: One of the following, or a list of them if requests choose their drafter by name:
            - None: no drafter.
            - "auto": "suffix", then the model's own MTP layer if it has one.
            - "suffix" or "ngram": repetitions in the text.
            - "model:REF": a small model ("model:REF@ADAPTER" with an adapter).
            - "eagle3:REF", "medusa:REF", "block:REF", "early-exit:REF", or "head:REF" for any kind: a head that was
              trained for the model. "eagle3" or "medusa" without a REF is the head that comes with Paceline.
            - "early-exit:LAYERS": the first layers of the model. "early-exit:8@0.7" uses 8 layers and ends a chain
              where the probability falls below 0.7.
            - Several joined by "+": for each draft, the first of them that can propose one.
            - A `Drafter` object.
        draft: Tokens to draft per round: a length, a `DraftBudget`, or "auto", which adapts the length to cost and
            acceptance.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "auto", "cpu", "cuda" or "mps".
        quantize: "auto" keeps the quantised weights of a GGUF file as they are, and loads other files in `dtype`.
            "none" loads floats, as does any `dtype` other than "auto". "int8" and "int4" quantise
            (docs/how-to/quantize.md).
        draft_quantize: The same for a drafter's weights. "auto" is 4 bits.
        kv_type: Type of the target's keys and values: "bf16", "f16", "f32", or "int8", which takes 56% of the memory of
            "bf16" and changes the text slightly. "auto" is the model's dtype (docs/how-to/quantize.md).
        draft_vocab: The vocabulary of a draft model or EAGLE head: "auto" (the 49,152 lowest ids if the vocabulary has
            more than 65,536), a number of ids (0 for all), or a JSONL file of the model's own answers, to keep the most
            frequent tokens of these answers.
        revision: Branch, tag or commit of the model's hub id.
        draft_revision: The same for the drafter's hub id.
        token: Access token for the hub.
        allow_pickle: Read `pytorch_model.bin`, or `medusa_lm_head.pt` of a head, if there are no safetensors. Only
            tensors are read, and no code is run.
        progress: Show progress bars on stderr for downloads, compilation and loading that take more than two seconds.
            None shows them only on a terminal.
        exact: Raise an error unless the text stays the same bit for bit (`LLM.guarantee`). On CUDA, this needs slower
            kernels.
        preset: "fast", "low-memory" or "exact". It sets arguments that are left at their defaults.
        tensor_parallel: Split the target across the processes that torchrun started.
        device_map: Number of layers on each device, such as {"cuda:0": 20, "cpu": None} (None for the rest), or "auto".
        draft_device_map: The same for a draft model.
        chat_template: A Jinja file, the name of one of the model's templates (such as "tool_use"), or a template as
            text. It replaces the model's default template.
        prefix_memory: Memory for the states of earlier prompts and replies, in GiB. If a prompt begins like one of
            them, such as the next turn of a conversation, that beginning is not run through the model again. The text
            stays the same. The states stay on the model's device. A text with larger states than this is not kept, and
            0 keeps nothing.
        prefix_dir: A folder for these states, so that they outlive the process. The files contain the tokens of prompts
            and replies, and only their owner can read them. By default, nothing is written.
        prefix_disk: Maximum size of this folder, in GiB. The least recently used files are removed first.
        mmproj: The file with the vision tower of a GGUF model, in llama.cpp's format. The default is a file named
            "mmproj" in the model's folder.

    Raises:
        PacelineError: If the model or the drafter cannot be loaded. The message names the cause and the fix.
    """
    arguments = LoadArguments(
        model=model,
        adapter=adapter,
        adapters=adapters,
        tokenizer=tokenizer,
        drafter=drafter,
        draft=draft,
        dtype=dtype,
        device=device,
        quantize=quantize,
        draft_quantize=draft_quantize,
        kv_type=kv_type,
        draft_vocab=draft_vocab,
        revision=revision,
        draft_revision=draft_revision,
        token=token,
        allow_pickle=allow_pickle,
        progress=sys.stderr.isatty() if progress is None else progress,
        exact=exact,
        tensor_parallel=tensor_parallel,
        device_map=device_map,
        draft_device_map=draft_device_map,
        chat_template=chat_template,
        prefix_memory=prefix_memory,
        prefix_dir=prefix_dir,
        prefix_disk=prefix_disk,
        mmproj=mmproj,
    )
    return _load(arguments if preset is None else arguments.with_preset(preset))


@gc_paused()
def _load(arguments: LoadArguments) -> LLM:
    SANDBOX.start()  # starts the process that renders chat templates, while the model loads
    drafter, budget, adapters = arguments.drafter, to_tree(arguments.draft), check_adapters(arguments.adapters or {})
    own = {name: one.drafter and spec_name(one.drafter) for name, one in adapters.items()}
    more = [*filter(None, own.values())]
    specs: list[Any] = [drafter] if isinstance(drafter, str | Drafter | None) else [*drafter]
    check_specs([*specs, *more], arguments.draft_quantize)
    check_precision(arguments.quantize)
    check_kv_type(arguments.kv_type)
    check_draft_vocab(arguments.draft_vocab)
    prefix_limits = _prefix_limits(arguments)
    loaded = load_target(arguments, adapters)
    if arguments.chat_template is not None:
        loaded = replace(loaded, tokenizer=loaded.tokenizer.with_template(arguments.chat_template))
    llm = LLM(loaded, load_drafters(arguments, more, loaded), budget, own)
    if drafter in (None, "none"):
        llm.engine.policies.default = Speculation(None)
    llm._arguments = arguments if isinstance(arguments.model, (str, Path)) and not arguments.tensor_parallel else None
    llm.engine.remember(*prefix_limits, lazy=True)
    if arguments.exact:
        check_exact(llm.guarantee, loaded.target.device)
    return llm


def _prefix_limits(arguments: LoadArguments) -> tuple[int, Path | None, int]:
    """Return the arguments of `Engine.remember`. Raise `InvalidOption` if an argument of `load` is not valid."""
    sizes = {"prefix_memory": arguments.prefix_memory, "prefix_disk": arguments.prefix_disk}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < math.inf:
            raise InvalidOption(f"{name} must be a number of GiB, got {size!r}", "Use 1, for example")
    memory, disk = (int(size * 2**30) for size in sizes.values())
    if arguments.prefix_dir is None:
        return memory, None, 0
    if arguments.tensor_parallel:
        raise InvalidOption(
            "prefix_dir does not support tensor parallelism", "Leave out prefix_dir, or use one process"
        )
    if not (memory and disk):
        raise InvalidOption("prefix_dir needs memory and disk space", "Set prefix_memory and prefix_disk above 0")
    return memory, Path(arguments.prefix_dir).expanduser(), disk
