# ruff: noqa: RUF001 (DeepSeek's markers)
"""Tool calling: the format in which a family of models writes function calls, detected from its chat template.

`calls.py` parses them. The formats are those of the families' own templates, in the table `FORMATS`.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.server.lark import json_of, literal
from paceline.server.tagged import Tags

Schema = Mapping[str, Any]

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a function that declares none, as OpenAI's API defines it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Format in which a family writes calls.

    `templates`: texts that the family's chat templates contain, all of them. `start`, `end`: markers around calls ("":
    the end of the text). `call`: text before the name of a call, between it and the arguments, and after them. `tags`:
    those around each argument; without them the arguments are JSON. `quote`: marker around texts. `first`: characters
    of which one follows `start` (""; any). `bare`: a text that begins with "{" is a call too. `id_length`: length of a
    call's id, which is prefixed with "call_" if long. `also`: other beginnings of a call that the models write.
    """

    name: str
    templates: tuple[str, ...] = ()
    start: str
    end: str
    call: tuple[str, str, str]
    tags: Tags | None = None
    quote: str = ""
    first: str = "{["
    bare: bool = False
    id_length: int = 24
    also: tuple[CallFormat, ...] = ()

    def new_id(self) -> str:
        """Return a random id for a call."""
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return made if self.id_length < 24 else f"call_{made}"

    @property
    def ends_itself(self) -> bool:
        """Whether the end of a call can be told without `end`."""
        return self.tags is None or self.call[2] != self.end

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser must see, also where it is a special token."""
        tags = (self.tags.before, self.tags.between, self.tags.after) if self.tags else ()
        return self.start, *re.findall("<[^<>\\n]+>", "\n".join((self.end, self.quote, *self.call, *tags)))

    def head(self, name: str) -> str:
        """Return a call generated under `grammar` up to its arguments."""
        return self.call[0] + name + self.call[1]

    def forced(self, schema: Schema | None) -> CallFormat:
        """Return the format of a call generated under `grammar`: JSON if the family's own cannot hold to the schema."""
        if self.tags is None or self.tags.rules("arguments", schema or NO_ARGUMENTS, {}):
            return self
        return replace(self, call=_json_call(self.start + "\n", "\n" + self.end), tags=None)

    def grammar(
        self, functions: Sequence[tuple[str, Schema | None]], special: Mapping[str, int], content: Schema | None = None
    ) -> str:
        """Return llguidance's Lark grammar of exactly one call of these (name, JSON schema of the arguments).

        `special`: ids of the markers that are special tokens. `content`: schema of JSON that may be generated instead
        of a call. Each schema is a document of its own, so its references stay within it.
        """
        calls = [f"call_{i}" for i in range(len(functions))]
        rules = [f"start: {' | '.join(calls if content is None else [*calls, 'content'])}"]
        for i, (name, schema) in enumerate(functions):
            form = self.forced(schema)
            rules.append(
                f"call_{i}: {literal(form.head(name), special)} arguments_{i} {literal(form.call[2], special)}"
            )
            rules += form._arguments(f"arguments_{i}", schema or NO_ARGUMENTS, special)
        if content is not None:
            rules.append(f"content: {json_of(content)}")
        return "\n".join(rules) + "\n"

    def _arguments(self, name: str, schema: Schema, special: Mapping[str, int]) -> list[str]:
        tagged = self.tags.rules(name, schema, special) if self.tags else None
        return tagged or [f"{name}: {json_of(schema)}"]


def _json_call(before: str, after: str, key: str = "arguments") -> tuple[str, str, str]:
    """Return the texts around the name and the arguments of a call that is one JSON object."""
    return before + '{"name": "', f'", "{key}": ', "}" + after


_SEPARATOR = "<｜tool▁sep｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

SEED = CallFormat(
    name="seed",
    templates=("<seed:tool_call>",),
    start="<seed:tool_call>",
    end="</seed:tool_call>",
    call=("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
    tags=Tags("<parameter=", ">", "</parameter>\n"),
    first="<{[",
)
MINIMAX = CallFormat(
    name="minimax",
    templates=("<minimax:tool_call>",),
    start="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call=('<minimax:tool_call>\n<invoke name="', '">\n', "</invoke>\n</minimax:tool_call>"),
    tags=Tags('<parameter name="', '">', "</parameter>\n"),
    first="<{[",
)
_CODER = CallFormat(
    name="qwen",
    templates=("<tool_call>", "<function=", "<parameter="),
    start="<tool_call>",
    end="</tool_call>",
    call=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    tags=Tags("<parameter=", ">\n", "\n</parameter>\n"),
    first="<{[",
)
QWEN = replace(_CODER, also=(replace(_CODER, start="<function=", first=""),))
"""Qwen3-Coder's, which sometimes leaves the first marker out, and Qwen3.5's."""
GLM = CallFormat(
    name="glm",
    templates=("<tool_call>", "<arg_key>", "<arg_value>"),
    start="<tool_call>",
    end="</tool_call>",
    call=("<tool_call>", "\n", "</tool_call>"),
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    first="",
)
LFM = CallFormat(
    name="pythonic",
    templates=("<|tool_call_start|>",),
    start="<|tool_call_start|>",
    end="<|tool_call_end|>",
    call=_json_call("<|tool_call_start|>[", "]<|tool_call_end|>"),
    first="",
)
"""LFM2's: a list of calls in Python; JSON if that is asked for, as in forced calls."""
GEMMA = CallFormat(
    name="gemma",
    templates=("<|tool_call>", '<|"|>'),
    start="<|tool_call>",
    end="<tool_call|>",
    call=("<|tool_call>call:", "", "<tool_call|>"),
    quote='<|"|>',
    first="c",
)
"""Gemma 4's: JSON without quotes around names, and with a token of its own around texts. Forced calls are JSON."""
DEEPSEEK_V3 = CallFormat(
    name="deepseek",
    templates=(_SEPARATOR, "```json"),
    start="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call=(f"{_BEGIN}function{_SEPARATOR}", "\n```json\n", f"\n```{_END}"),
    first="<",
)
DEEPSEEK = replace(DEEPSEEK_V3, templates=(_SEPARATOR,), call=(_BEGIN, _SEPARATOR, _END))
"""DeepSeek V3.1's."""
HERMES = CallFormat(
    name="hermes",
    templates=("<tool_call>",),
    start="<tool_call>",
    end="</tool_call>",
    call=_json_call("<tool_call>\n", "\n</tool_call>"),
)
"""Hermes', Qwen2.5's, Qwen3's and SmolLM2's."""
MISTRAL = CallFormat(
    name="mistral",
    templates=("[TOOL_CALLS]",),
    start="[TOOL_CALLS]",
    end="",
    call=_json_call("[TOOL_CALLS][", "]"),
    id_length=9,
)
"""A list of objects, or names and objects."""
LLAMA = CallFormat(
    name="llama",
    templates=("<|start_header_id|>", "ipython"),
    start="<|python_tag|>",
    end="",
    call=_json_call("", "", "parameters"),
    bare=True,
)
FENCED = CallFormat(name="fenced", start="```json", end="\n```", call=_json_call("```json\n", "\n```"))
"""Format that Qwen2.5-Coder uses in place of its own family's."""
FORMATS = (SEED, MINIMAX, QWEN, GLM, LFM, GEMMA, DEEPSEEK_V3, DEEPSEEK, HERMES, MISTRAL, LLAMA)
"""The families: the first whose texts a template contains is the model's."""


def family(template: str | None) -> CallFormat:
    """Return the format of a chat template's family, by default Hermes', which `with_tools` describes to the model."""
    return next((form for form in FORMATS if all(text in (template or "") for text in form.templates)), HERMES)


def knows_tools(template: str | None) -> bool:
    """Return whether the template itself shows the tools to the model."""
    return bool(re.search(r"\btools\b", template or ""))


_INSTRUCTIONS = """You can call these functions. To call one, write a JSON object within these tags, and nothing else:
<tool_call>
{"name": <its name>, "arguments": <its arguments as an object>}
</tool_call>
The functions:
<tools>
%s
</tools>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """Return a chat for a template without tools: the functions are described in the system message, calls and results
    become text in Hermes' format."""
    chat = [_as_text(message) for message in messages]
    if not tools:
        return chat
    system = _INSTRUCTIONS % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{system}"}, *chat[1:]]
    return [{"role": "system", "content": system}, *chat]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join([*([text] if text or not calls else []), *calls])}
