"""From a request to the jobs of its replies: prompt, tokens, sampling, speculation, grammar."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.chat import thinking, tools
from paceline.chat.calls import CallParser, ForcedCallParser, ReasonedCalls
from paceline.chat.thinking import ThoughtFormat
from paceline.chat.tools import CallFormat
from paceline.engine.draft_policy import SPECULATION_OFF, Speculation
from paceline.engine.prediction import predicted_ids
from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from paceline.sampling.parameters import Sampling
from paceline.server import grammars
from paceline.server.errors import LOG, REQUEST_ID, ContextExceeded, bad_request
from paceline.server.images import check_client_present, check_memory, pictures_in, read_images
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import ChatReply
from paceline.server.request import ChatMessage, ChatPrompt, GenerateRequest, TextPrompt, ToolOffer
from paceline.server.schema import SpeculationOptions
from paceline.server.worker import Busy, ReplyJob
from paceline.text.chat_template import check_messages
from paceline.text.infill import infill_prompt, infill_tokens
from paceline.types import DraftBudget
from paceline.vision.picture import Picture
from paceline.vision.tool_images import render_images

_MAX_BRANCHES = 512
"""Maximum branches of a drafted tree. It is large enough not to limit any tree."""
_RESERVED_VARIABLES = {"messages", "tools", "add_generation_prompt", "self"}
"""Variables of a template that a request cannot set."""
_REPLY_DIVISOR = 4
"""If messages are left out, 1 / `_REPLY_DIVISOR` of the context is kept for a reply without a length limit."""


@dataclass(slots=True)
class PreparedRequest:
    """A request that is ready to run.

    Attributes:
        id: The id of the answer.
        model: The model.
        jobs: The jobs of the replies.
        replies: The reply of each job. It is empty until rounds are added.
    """

    id: str
    model: LoadedModel
    jobs: list[ReplyJob]
    replies: Sequence[ChatReply]

    @property
    def sampling(self) -> Sampling:
        """The sampling of the replies; the model's recommended sampling if there are no jobs."""
        return self.jobs[0].sampling if self.jobs else self.model.llm.sampling()


def prepare(model: LoadedModel, settings: Settings, request: GenerateRequest | None, answer_id: str) -> PreparedRequest:
    """Prepare the replies to a request; None asks for an empty reply. Raises `PacelineError` and `ApiError`."""
    if request is None:
        return PreparedRequest(answer_id, model, [], [ChatReply()])
    if isinstance(request.prompt, TextPrompt):
        jobs = _text_jobs(model, settings, request, request.prompt)
        return PreparedRequest(answer_id, model, jobs, [ChatReply() for _ in jobs])
    prompt = read_images(model.llm, settings, request.prompt)
    try:
        jobs, replies = _chat(model, settings, request, prompt)
    except ContextExceeded:
        if not prompt.may_truncate:
            raise
        most = prompt_limit(model.llm, settings)
        prompt = truncated(prompt, lambda shorter: _size(model.llm, settings, shorter), most, request.max_tokens)
        jobs, replies = _chat(model, settings, request, prompt)
    return PreparedRequest(answer_id, model, jobs, replies)


def _chat(
    model: LoadedModel, settings: Settings, request: GenerateRequest, prompt: ChatPrompt
) -> tuple[list[ReplyJob], list[ChatReply]]:
    """Return the jobs of a chat, and a new reply for each."""
    llm, functions = model.llm, prompt.tools.schemas
    call_format, (text, pictures) = _call_format(llm), chat_text(llm, prompt)
    check_length(llm, settings, text, "messages")
    thought_format = thinking.thought_format_of(llm.tokenizer.template_for(bool(prompt.tools.offered)))
    budget = None
    if thought_format and request.thinking_budget is not None and not thought_format.over(text):
        budget = thought_format.budget(request.thinking_budget, thought_format.begun(text))
    if thought_format and (thought_format.over(text) or not (prompt.split or thought_format is thinking.HARMONY)):
        thought_format = None
    inside = thought_format is not None and thought_format.begun(text)
    markers = _special(
        llm, *(call_format.markers if functions else ()), *(thought_format.markers if thought_format else ())
    )
    call_rules = None
    if functions:
        content = grammars.content_schema(request.constraints)
        if prompt.tools.forced or content is not None:
            call_rules = call_format.grammar([*functions.items()], markers, None if prompt.tools.forced else content)
    thought_rules = thought_format.rules(inside, markers) if thought_format else None
    grammar = grammars.grammar(model.grammar_trials, request.constraints, call_rules, thought_rules)
    if grammar and thought_format is None:
        budget = None  # the grammar leaves no room for reasoning
    tokens = chat_ids(llm, text, pictures, prompt_limit(llm, settings))
    check_length(llm, settings, tokens, "messages")
    sampling = replace(_sampling(llm, request, grammar), thinking_budget=budget)
    if thought_format:
        sampling = replace(sampling, reasoning=thought_format.reasoning(inside))
    if request.prediction:
        # Tokenise the prediction here. If the engine did it when the reply begins, all other replies would wait.
        most, size = sampling.max_new_tokens, llm.model.target.vocab_size
        sampling = replace(sampling, prediction=predicted_ids(request.prediction, llm.tokenizer.encode, most, size))
    jobs = _jobs(llm, settings, request, [tokens], sampling)
    shown = {token: marker for marker, token in markers.items()}
    bare = grammar is None
    return jobs, [_new_reply(prompt.tools, call_format, bare, thought_format, inside, shown) for _ in jobs]


def _new_reply(
    offer: ToolOffer,
    call_format: CallFormat,
    bare: bool,
    thought_format: ThoughtFormat | None,
    inside: bool,
    markers: Mapping[int, str],
) -> ChatReply:
    """Return an empty reply with its parsers.

    Args:
        offer: The functions and the tool choice.
        call_format: The format of calls.
        bare: See `CallParser`.
        thought_format: The format of reasoning. None if reasoning is part of the text.
        inside: True if the prompt ends inside the reasoning.
        markers: See `ChatReply`.
    """
    functions = offer.schemas
    call_parser: CallParser | ForcedCallParser | None = None
    unclosed_thought_calls = None
    if offer.forced:
        call_parser = ForcedCallParser(call_format, functions)
    elif functions:
        call_parser = CallParser(call_format, functions, offer.single, bare)
        unclosed_thought_calls = ReasonedCalls(call_format, functions, offer.single) if thought_format else None
    return ChatReply(
        call_parser=call_parser,
        thought_parser=thought_format.parser(inside) if thought_format else None,
        unclosed_thought_calls=unclosed_thought_calls,
        markers=markers,
    )


def _text_jobs(model: LoadedModel, settings: Settings, request: GenerateRequest, prompt: TextPrompt) -> list[ReplyJob]:
    """Return the jobs of prompts that are text or token ids and need no chat template."""
    llm, texts = model.llm, prompt.texts
    params = [f"{prompt.param}.{i}" if len(texts) > 1 else prompt.param for i in range(len(texts))]
    others = "".join((prompt.after or "", *(part for file in prompt.files for part in file)))
    for text, param in zip(texts, params, strict=True):
        if isinstance(text, str):
            check_length(llm, settings, text + others, param)
    prompts = [_prompt_ids(llm, prompt, text, param) for text, param in zip(texts, params, strict=True)]
    for tokens in prompts:
        check_length(llm, settings, tokens, "prompt")
    grammar = grammars.grammar(model.grammar_trials, request.constraints)
    sampling = _sampling(llm, request, grammar)
    if prompt.after is not None and prompt.ends:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill_tokens(llm.tokenizer).ends))
    made = _jobs(llm, settings, request, prompts, sampling)
    return [replace(job, prompt_only=True) for job in made] if request.max_tokens == 0 else made


def _prompt_ids(llm: LLM, prompt: TextPrompt, text: str | Sequence[int], param: str) -> list[int]:
    """Return a prompt's token ids. Raises `ApiError` 400."""
    if prompt.after is None:
        return token_ids(llm, text, param)
    if not isinstance(text, str):
        raise bad_request(f"with suffix, {param} must be text, got token ids", param)
    try:
        return infill_prompt(llm.tokenizer, text, prompt.after, prompt.files)
    except InvalidPrompt as error:
        raise bad_request(str(error), "suffix" if prompt.param == "prompt" else None) from error


def _sampling(llm: LLM, request: GenerateRequest, grammar: Grammar | None) -> Sampling:
    """Return the model's recommended sampling, overridden by the request."""
    most = request.max_tokens
    if most < 0:
        most = llm.model.target.context_length // request.share
    fields: dict[str, Any] = {**request.sampling, **({"grammar": grammar} if grammar else {})}
    # A round generates at least one token; it is not shown if none was requested.
    return llm.sampling(max_new_tokens=max(1, most), logprobs=request.logprobs, **fields).seeded()


def _jobs(
    llm: LLM, settings: Settings, request: GenerateRequest, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[ReplyJob]:
    """Return a job for each sample of each prompt in turn. Raises `ApiError` 400 for too many replies, and the errors
    of `Sampling.sampler`."""
    n = request.samples
    if n > settings.max_n or n * len(prompts) > settings.max_choices:
        raise bad_request(
            f"n={n} replies to {len(prompts)} prompts are too many: "
            f"the limits are {settings.max_n} per prompt and {settings.max_choices} in all",
            "n",
        )
    how = _speculation(llm, request.speculation)
    made = []
    for tokens in prompts:
        # Raise errors before anything is queued, and keep compiled grammars alive until the reply begins.
        sampler = sampling.sampler(vocabulary=llm.vocabulary)
        group = object()
        made += [ReplyJob(tokens, sampling, i, how, group=group, keep_alive=sampler) for i in range(n)]
    return made


def _speculation(llm: LLM, options: str | SpeculationOptions | None) -> Speculation | None:
    """Return how to draft, None for the server's default. Raises `ApiError` 400 for a drafter that is not loaded."""
    if options is None or options == "auto":
        return None
    if isinstance(options, str) or options.max_draft == 0:
        return SPECULATION_OFF
    drafter = options.drafter or llm.engine.policies.default.drafter
    try:
        _ = llm.engine.policies[drafter]
    except PacelineError as error:
        raise bad_request(str(error), "speculation.drafter") from error
    limit = options.max_draft
    return Speculation(drafter, None if limit is None else DraftBudget(limit, limit, _MAX_BRANCHES))


def token_ids(llm: LLM, prompt: Any, param: str, chat: bool = False) -> list[int]:
    """Return the token ids of a prompt, which is text or token ids.

    `chat`: True for the text of a chat template, which already has its special tokens. Raises `ApiError` 400.
    """
    try:
        return llm.encode(llm.tokenizer.encode(prompt, special=False) if chat else prompt, raw=True)
    except PacelineError as error:
        raise bad_request(str(error), param) from error


def chat_ids(llm: LLM, text: str, pictures: Sequence[Picture], limit: int) -> list[int]:
    """Return the token ids of a chat's text with its images (see `chat_text`). Raises `ApiError` 400 and 503.

    A prompt of more than `limit` tokens is refused before its images are encoded, because an image may take seconds.
    """
    if not pictures or llm.vision is None:
        return token_ids(llm, text, "messages", chat=True)

    check_memory(llm.vision)

    def check(tokens: int) -> None:
        check_client_present()
        if tokens > limit:
            raise ContextExceeded(tokens, limit, "messages", exact=False)

    try:
        return llm.vision.prompt(text, pictures, partial(llm.tokenizer.encode, special=False), check)
    except InvalidPrompt as error:
        raise bad_request(str(error), "messages") from error


def prompt_limit(llm: LLM, settings: Settings) -> int:
    """Return the maximum number of tokens of a prompt, which leaves room for one token of the reply."""
    context = llm.model.target.context_length
    return min(context - 1, settings.max_prompt or context)


def check_length(llm: LLM, settings: Settings, prompt: str | Sequence[int], param: str) -> None:
    """Raise `ContextExceeded` for a prompt that is too long, or leaves no room for a reply.

    Text that is certainly too long is refused before it is tokenised.
    """
    limit, size = prompt_limit(llm, settings), len(prompt)
    if is_text := isinstance(prompt, str):
        longest = llm.tokenizer.max_token_chars
        size = 0 if longest is None else -(-size // longest)
    if size > limit:
        context = llm.model.target.context_length
        raise ContextExceeded(size, context if limit == context - 1 else limit, param, exact=not is_text)


def chat_tokens(llm: LLM, settings: Settings, prompt: ChatPrompt) -> list[int]:
    """Return the token ids of a chat's prompt. Raises `ApiError` 400."""
    prompt = read_images(llm, settings, prompt)
    text, pictures = chat_text(llm, prompt)
    check_length(llm, settings, text, "messages")
    return chat_ids(llm, text, pictures, prompt_limit(llm, settings))


def _size(llm: LLM, settings: Settings, prompt: ChatPrompt) -> int:
    """Return the number of tokens of a chat's prompt, or a lower bound if its text is certainly too long."""
    try:
        return len(chat_tokens(llm, settings, prompt))
    except ContextExceeded as error:
        return error.size


def _special(llm: LLM, *markers: str) -> dict[str, int]:
    """Return marker -> id, for the markers that are special tokens. The text of a reply does not contain special
    tokens."""
    ids = {marker: llm.tokenizer.token_id(marker) for marker in markers}
    return {marker: token for marker, token in ids.items() if token is not None and token in llm.tokenizer.special_ids}


def _call_format(llm: LLM) -> CallFormat:
    """Return the format in which a model writes calls."""
    template, token_id = llm.tokenizer.template_for(tools=True), llm.tokenizer.token_id
    return tools.call_format_of(
        template if tools.knows_tools(template) else None, lambda text: token_id(text) is not None
    )


def chat_text(llm: LLM, prompt: ChatPrompt) -> tuple[str, Sequence[Picture]]:
    """Return a chat's prompt as text, and the pictures in it. Raises `ApiError` 400 naming the messages."""
    if reserved := prompt.values.keys() & _RESERVED_VARIABLES:
        raise bad_request(f"chat_template_kwargs must not contain {reserved.pop()!r}", "chat_template_kwargs")
    try:
        chat, pictures = [message.as_dict() for message in prompt.messages], pictures_in(prompt)
        if llm.vision is None or not pictures:
            return _rendered(llm, prompt, chat), ()
        return render_images(llm.vision, check_messages(chat), pictures, partial(_rendered, llm, prompt))
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _rendered(llm: LLM, prompt: ChatPrompt, chat: list[dict[str, Any]]) -> str:
    given = [function.shown for function in prompt.tools.offered]
    template = llm.tokenizer.template_for(bool(given))
    if tools.knows_tools(template):
        chat, given = tools.adapt_to_template(template, _call_format(llm), check_messages(chat), given)
        return _applied(llm, prompt, chat, given)
    if given:
        return _applied(llm, prompt, tools.with_tools(check_messages(chat), given), [])
    try:
        return _applied(llm, prompt, chat, [])
    except InvalidPrompt:
        if not any(message["role"] == "tool" or "tool_calls" in message for message in chat):
            raise
        return _applied(llm, prompt, tools.with_tools(check_messages(chat), []), [])


def _applied(llm: LLM, prompt: ChatPrompt, chat: list[dict[str, Any]], given: list[dict[str, Any]]) -> str:
    values = {"tools": given or None, **prompt.values}
    if prompt.continues_last:
        return _continued(llm, chat, values)
    text = llm.tokenizer.apply_chat_template(chat, prompt.opens_reply, **values)
    form = thinking.thought_format_of(llm.tokenizer.template_for(bool(given)))
    return form.skip(text) if form and values.get("enable_thinking") is False else text


def _continued(llm: LLM, chat: list[dict[str, Any]], values: dict[str, Any]) -> str:
    """Return the prompt up to the end of the last message. A marker shows where the template begins to close the
    message."""
    marker = f"[{uuid.uuid4().hex}]"
    content = check_messages(chat[-1:])[0]["content"]
    text = llm.tokenizer.apply_chat_template([*chat[:-1], {**chat[-1], "content": content + marker}], False, **values)
    before, found, _ = text.partition(marker)
    if not found:
        raise InvalidPrompt(
            "the chat template does not show the last message, which the reply is to continue",
            "Send it as the user's, or leave out continue_final_message",
        )
    return before


def truncated(prompt: ChatPrompt, size: Callable[[ChatPrompt], int], limit: int, wanted: int) -> ChatPrompt:
    """Return a chat without its oldest messages. It drops as few messages as possible so that prompt and reply fit.

    Instructions and the last message stay. After the instructions, the chat does not begin with the result of a tool,
    unless only the last message is left.

    Args:
        prompt: A chat that is too long.
        size: Returns the tokens of a chat's prompt.
        limit: Maximum tokens of a prompt.
        wanted: Maximum tokens of the reply. -1 for no limit.
    """
    messages = prompt.messages
    room = limit - min(limit // _REPLY_DIVISOR, wanted if wanted > 0 else limit)
    last = len(messages) - 1
    starts = [i for i in range(1, last + 1) if i == last or messages[i].role in ("user", "assistant")]

    def without(start: int) -> ChatPrompt:
        return replace(prompt, messages=_from(messages, start))

    # The later the start, the shorter the prompt.
    index = bisect_left(starts, True, key=lambda start: size(without(start)) <= room)
    if not starts:
        return prompt
    shorter = without(starts[min(index, len(starts) - 1)])
    LOG.warning(
        "%s the prompt exceeds %d tokens: the oldest %d of %d messages are left out",
        REQUEST_ID.get(),
        limit,
        len(messages) - len(shorter.messages),
        len(messages),
    )
    return shorter


def _from(messages: Sequence[ChatMessage], start: int) -> list[ChatMessage]:
    """Return all instructions, and the other messages beginning with `start`."""
    return [message for i, message in enumerate(messages) if i >= start or message.role == "system"]
