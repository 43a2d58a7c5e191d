# ruff: noqa: RUF001 (DeepSeek's markers)
"""Tool calling: the formats of function calls, by model family. A model's format is detected from its chat template.

`calls.py` parses the calls. The table `FORMATS` follows the chat templates of the families.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.chat.tagged import Tags
from paceline.sampling.lark import json_expression, text_expression
from paceline.text.loose_json import dumps
from paceline.text.past_calls import with_counted_ids

Schema = Mapping[str, Any]
_LETTERS = string.ascii_letters + string.digits

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function that declares no parameters, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The format of a family's function calls. `calls.py` parses it, and grammars force it.

    Attributes:
        name: Name of the format.
        templates: Texts that identify a chat template of the family. It contains all of them.
        token: A token that identifies the family by its vocabulary. Empty if `start` does.
        start: Marker before calls.
        end: Marker after calls. It may be missing, since a call ends where its JSON ends.
        heads: Texts around the name of a call. Each may be missing.
        tails: Texts after the arguments of a call. Each may be missing.
        call: For grammars, the text of a call before its name, between name and arguments, and after the arguments.
        tags: The tags around each argument. None if arguments are JSON.
        quote: Marker that replaces the quotation marks around strings.
        last: True if a call in this format must be at the end of the reply.
        call_id: Form of a call's id: "call" (call_ and 24 characters), "letters" (9 characters), or "counted"
            (functions.NAME:NUMBER).
        also: Other formats that these models write.
    """

    name: str
    templates: tuple[str, ...] = ()
    token: str = ""
    start: str
    end: str = ""
    heads: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()
    call: tuple[str, str, str]
    tags: Tags | None = None
    quote: str = ""
    last: bool = False
    call_id: str = "call"
    also: tuple[CallFormat, ...] = ()

    def new_id(self) -> str:
        """Return a random id for a call."""
        length = 9 if self.call_id == "letters" else 24
        made = "".join(secrets.choice(_LETTERS) for _ in range(length))
        return made if self.call_id == "letters" else f"call_{made}"

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parser must see, even if they are special tokens."""
        tags = (self.tags.before, self.tags.between, self.tags.after) if self.tags else ()
        found = {self.start, self.end, self.token, self.quote, *self.heads, *self.tails}
        found |= {*re.findall("<[^<>\\n]+>", "\n".join((*self.call, *tags)))}
        return frozenset(filter(None, found)).union(*(form.markers for form in self.also))

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a call."""
        return (*self.tails, *filter(None, (self.end,)))

    def head(self, name: str) -> str:
        """Return the text of a call generated under `grammar`, up to its arguments."""
        return self.call[0] + name + self.call[1]

    def forced(self, schema: Schema | None) -> CallFormat:
        """Return the format of a call generated under `grammar`.

        This is JSON if a grammar of the family's own format cannot enforce the schema.
        """
        if self.tags is None:
            return self
        if self.tags.rules("arguments", arguments_schema(schema), {}):
            return self
        if self.tags.kind:
            return replace(self, tags=None, call=(*self.call[:2], "\n" + self.call[2]))
        return replace(self, call=_json_call(self.start + "\n", "\n" + self.end), tags=None)

    def grammar(
        self, functions: Sequence[tuple[str, Schema | None]], special: Mapping[str, int], content: Schema | None = None
    ) -> str:
        """Return a Lark grammar, for llguidance, of exactly one call.

        Args:
            functions: The name and the JSON schema of the arguments of each function. References in a schema are
                resolved within that schema.
            special: Ids of the markers that are special tokens.
            content: Schema of JSON that may be generated instead of a call. None if a call is required.
        """
        calls = [f"call_{i}" for i in range(len(functions))]
        rules = [f"start: {' | '.join(calls if content is None else [*calls, 'content'])}"]
        for i, (name, schema) in enumerate(functions):
            form = self.forced(schema)
            before, after = (text_expression(text, special) for text in (form.head(name), form.call[2]))
            rules.append(f"call_{i}: {before} arguments_{i} {after}")
            rules += form._arguments(f"arguments_{i}", arguments_schema(schema), special)
        if content is not None:
            rules.append(f"content: {json_expression(content)}")
        return "\n".join(rules) + "\n"

    def _arguments(self, name: str, schema: Schema, special: Mapping[str, int]) -> list[str]:
        tagged = self.tags.rules(name, schema, special) if self.tags else None
        return tagged or [f"{name}: {json_expression(schema)}"]


def arguments_schema(schema: Schema | None) -> Schema:
    """Return the schema of a function's arguments, with the type "object", which is always required."""
    return {**schema, "type": "object"} if schema else NO_ARGUMENTS


def _json_call(before: str, after: str, key: str = "arguments") -> tuple[str, str, str]:
    """Return `CallFormat.call` for a call that is one JSON object."""
    return before + '{"name": "', f'", "{key}": ', "}" + after


_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_INVOKE, _PARAMETER = "｜DSML｜invoke", "｜DSML｜parameter"

SEED = CallFormat(
    name="seed",
    templates=("<seed:tool_call>",),
    start="<seed:tool_call>",
    end="</seed:tool_call>",
    heads=("<function=", ">"),
    tails=("</function>",),
    call=("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
    tags=Tags("<parameter=", ">", "</parameter>\n"),
)
MINIMAX = CallFormat(
    name="minimax",
    templates=("<minimax:tool_call>",),
    start="<minimax:tool_call>",
    end="</minimax:tool_call>",
    heads=('<invoke name="', '">'),
    tails=("</invoke>",),
    call=('<minimax:tool_call>\n<invoke name="', '">\n', "</invoke>\n</minimax:tool_call>"),
    tags=Tags('<parameter name="', '">', "</parameter>\n"),
)
DSML = CallFormat(
    name="dsml",
    templates=("｜DSML｜",),
    token="｜DSML｜",
    start="<｜DSML｜function_calls>",
    end="</｜DSML｜function_calls>",
    heads=(f'<{_INVOKE} name="', '">'),
    tails=(f"</{_INVOKE}>",),
    call=(f'<｜DSML｜function_calls>\n<{_INVOKE} name="', '">\n', f"</{_INVOKE}>\n</｜DSML｜function_calls>"),
    tags=Tags(f'<{_PARAMETER} name="', '">', f"</{_PARAMETER}>\n", kind='" string="'),
)
"""DeepSeek V3.2. A forced call has JSON inside `invoke` if a grammar of tags cannot enforce the schema."""
_CODER = CallFormat(
    name="qwen",
    templates=("<tool_call>", "<function=", "<parameter="),
    start="<tool_call>",
    end="</tool_call>",
    heads=("<function=", ">"),
    tails=("</function>",),
    call=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    tags=Tags("<parameter=", ">\n", "\n</parameter>\n"),
)
QWEN = replace(_CODER, also=(replace(_CODER, start="<function="),))
"""Qwen3-Coder, which sometimes omits the first marker, and Qwen3.5."""
GLM = CallFormat(
    name="glm",
    templates=("<tool_call>", "<arg_key>", "<arg_value>"),
    start="<tool_call>",
    end="</tool_call>",
    call=("<tool_call>", "\n", "</tool_call>"),
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
LFM = CallFormat(
    name="pythonic",
    templates=("<|tool_call_start|>",),
    start="<|tool_call_start|>",
    end="<|tool_call_end|>",
    call=_json_call("<|tool_call_start|>[", "]<|tool_call_end|>"),
)
"""LFM2: a list of calls in Python syntax. Forced calls are JSON, because llguidance compiles schemas only to JSON. LFM2
also writes JSON on request."""
KIMI = CallFormat(
    name="kimi",
    templates=("<|tool_call_begin|>",),
    start="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    heads=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    tails=("<|tool_call_end|>",),
    call=(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    call_id="counted",
)
COHERE = CallFormat(
    name="cohere",
    templates=("<|START_ACTION|>",),
    start="<|START_ACTION|>",
    end="<|END_ACTION|>",
    call=('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}\n]<|END_ACTION|>"),
)
"""Command R7B and Command A."""
APERTUS = CallFormat(
    name="apertus",
    templates=("<|tools_prefix|>",),
    start="<|tools_prefix|>",
    end="<|tools_suffix|>",
    call=('<|tools_prefix|>[{"', '": ', "}]<|tools_suffix|>"),
)
GEMMA = CallFormat(
    name="gemma",
    templates=("<|tool_call>", '<|"|>'),
    start="<|tool_call>",
    end="<tool_call|>",
    heads=("call:",),
    call=("<|tool_call>call:", "", "<tool_call|>"),
    quote='<|"|>',
)
"""Gemma 4: JSON with unquoted keys, and a special token instead of quotation marks. Forced calls are ordinary JSON."""
DEEPSEEK_V3 = CallFormat(
    name="deepseek",
    templates=(_SEPARATOR, "```json"),
    start="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    heads=(_BEGIN, f"function{_SEPARATOR}", _SEPARATOR, "```json"),
    tails=("```", _END),
    call=(
        f"<｜tool▁calls▁begin｜>{_BEGIN}function{_SEPARATOR}",
        "\n```json\n",
        f"\n```{_END}<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK = replace(
    DEEPSEEK_V3,
    templates=(_SEPARATOR,),
    call=(f"<｜tool▁calls▁begin｜>{_BEGIN}", _SEPARATOR, f"{_END}<｜tool▁calls▁end｜>"),
)
"""DeepSeek V3.1."""
PHI = CallFormat(
    name="phi",
    templates=("<|/tool|>",),
    token="<|/tool_call|>",
    start="<|tool_call|>",
    end="<|/tool_call|>",
    call=_json_call("<|tool_call|>[", "]<|/tool_call|>"),
)
"""Phi-4-mini, which also writes its list after "functools"."""
PHI = replace(PHI, also=(replace(PHI, start="functools"),))
GRANITE = CallFormat(
    name="granite",
    templates=("<|tool_call|>",),
    start="<|tool_call|>",
    call=_json_call("<|tool_call|>[", "]"),
)
"""Granite 3: a list without an end marker."""
HARMONY = CallFormat(
    name="harmony",
    templates=("<|channel|>", "<|message|>"),
    token="<|channel|>",
    start="<tool_call>",
    end="</tool_call>",
    call=_json_call("<tool_call>\n", "\n</tool_call>"),
)
"""gpt-oss. `HarmonyParser` rewrites its calls in the Hermes format."""
HERMES = replace(HARMONY, name="hermes", templates=("<tool_call>",), token="")
"""Hermes, Qwen2.5, Qwen3 and SmolLM2."""
MISTRAL = CallFormat(
    name="mistral",
    templates=("[TOOL_CALLS]",),
    start="[TOOL_CALLS]",
    heads=("[CALL_ID]", "[ARGS]"),
    call=_json_call("[TOOL_CALLS][", "]"),
    call_id="letters",
)
"""Mistral: a list of objects, or a name followed by an object."""
LLAMA = CallFormat(
    name="llama",
    templates=("<|start_header_id|>", "ipython"),
    start="<|python_tag|>",
    call=_json_call("", "", "parameters"),
    also=(
        CallFormat(
            name="function",
            start="<function=",
            heads=(">",),
            tails=("</function>",),
            call=("<function=", ">", "</function>"),
        ),
    ),
)
"""Llama 3: a reply that is a JSON object, sometimes after a marker or in a tag with the function's name."""
FENCED = CallFormat(name="fenced", start="```json", tails=("```",), call=_json_call("```json\n", "\n```"), last=True)
PLAIN = replace(HERMES, name="plain", templates=(), also=(FENCED,))
"""The Hermes format, which `with_tools` describes to a model if its template has no tools. A code block at the end of
the reply is also read as a call."""
FORMATS = (
    *(SEED, MINIMAX, DSML, QWEN, GLM, LFM, KIMI, COHERE, APERTUS, GEMMA, DEEPSEEK_V3, DEEPSEEK, PHI, GRANITE),
    *(HARMONY, HERMES, MISTRAL, LLAMA),
)
"""All families. The first one that matches a template is used."""


def call_format_of(template: str | None, has_token: Callable[[str], bool] = lambda _: False) -> CallFormat:
    """Return the format of a model's calls.

    The main format is identified by the chat template, else by the vocabulary, else it is `PLAIN`. The parser also
    reads every other format whose marker is a token of the model.

    Args:
        template: The chat template. None if it does not show tools to the model, which then uses `PLAIN`.
        has_token: Returns True if a text is a token of the model.
    """
    told = [form for form in FORMATS if has_token(form.token or form.start)]
    shown = (form for form in FORMATS if template and all(text in template for text in form.templates))
    main = next(shown, next(iter(told), PLAIN) if template else PLAIN)
    known = {main.start, *(form.start for form in main.also)}
    more = {form.start: form for form in reversed(told) if form.start not in known}
    return replace(main, also=(*main.also, *more.values())) if more else main


_TOOLS = r"""(?<![\w.'"])tools\b"""
"""Matches the variable `tools` in a template, but not an attribute `tools` of a message."""


def knows_tools(template: str | None) -> bool:
    """Return True if the template shows the tools to the model."""
    return bool(re.search(r"\btools\b", template or ""))


_INSTRUCTIONS = """You can call these functions. To call one, write a JSON object within these tags, and nothing else:
<tool_call>
{"name": <its name>, "arguments": <its arguments as an object>}
</tool_call>
The functions:
<tools>
%s
</tools>"""


def adapt_to_template(
    template: str | None, form: CallFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Adapt checked messages and tools to a template that knows tools, so that it drops none of them.

    Some templates read the tools from the system message (Phi-4-mini). Some do not show calls of earlier turns (LFM2,
    the first template of Kimi K2). These calls become text in the model's own format.

    Args:
        template: The chat template.
        form: The format of the model's calls.
        messages: The messages of the chat.
        tools: The tools, as in OpenAI's API.

    Returns:
        The messages and the tools for the template.
    """
    template, chat = template or "", [dict(message) for message in messages]
    if form.call_id == "counted":
        chat = with_counted_ids(chat)
    if "tool_calls" not in template:
        chat = [_calls_as_text(message, form) for message in chat]
    if not tools or re.search(_TOOLS, template):
        return chat, [*tools]
    described = dumps([tool["function"] for tool in tools])
    system = chat.pop(0) if chat and chat[0]["role"] == "system" else {"role": "system", "content": ""}
    return [{**system, "tools": described}, *chat], []


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """Adapt a chat to a template without tools.

    The system message describes the functions. Calls and results become text in the Hermes format.

    Args:
        messages: The messages of the chat.
        tools: The tools, as in OpenAI's API.
    """
    chat = [_as_text(message) for message in messages]
    if not tools:
        return chat
    system = _INSTRUCTIONS % "\n".join(map(dumps, tools))
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{system}"}, *chat[1:]]
    return [{"role": "system", "content": system}, *chat]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = message.get("content") or ""
        if isinstance(content, list):  # with images
            first, last = ({"type": "text", "text": tag} for tag in ("<tool_response>\n", "\n</tool_response>"))
            return {"role": "user", "content": [first, *content, last]}
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return _calls_as_text(message, HERMES)


def _calls_as_text(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    """Return a checked message whose calls have become text in a format."""
    if not (calls := message.get("tool_calls")):
        return dict(message)
    functions = [call["function"] for call in calls]
    written = [form.head(one["name"]) + dumps(one["arguments"]) + form.call[2] for one in functions]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [message.get("content"), *written]))}
