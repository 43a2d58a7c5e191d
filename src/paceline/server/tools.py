"""Tool calling: the format in which a family of models writes function calls, detected from its chat template.

The formats are those of the families' own templates: Hermes, Qwen2.5, Qwen3 and SmolLM2 write `<tool_call>` JSON
`</tool_call>`, Llama 3 a JSON object with "parameters" (after `<|python_tag|>` or not), Mistral `[TOOL_CALLS]` and a
JSON list, or a name and JSON. `calls.py` parses them.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sampling.grammar_compile import ONE_LINE

Schema = Mapping[str, Any]

_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a function that declares none, as OpenAI's API defines it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format in which a family writes calls.

    `start`, `end`: markers around a call ("": the end of the text). `key`: name of the arguments. `bare`: a text that
    begins with "{" is a call too. `id_length`: length of a call's id, which is prefixed with "call_" if long.
    """

    name: str
    start: str
    end: str
    key: str = "arguments"
    bare: bool = False
    id_length: int = 24

    def new_id(self) -> str:
        """Return a random id for a call."""
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return made if self.id_length < 24 else f"call_{made}"

    @property
    def _delimiters(self) -> tuple[str, str]:
        """Text before and after a call's object."""
        if self.end:
            return f"{self.start}\n", f"\n{self.end}"
        return ("", "") if self.bare else (f"{self.start}[", "]")

    def head(self, name: str) -> str:
        """Return a call generated under `grammar` up to its arguments."""
        return f'{self._delimiters[0]}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """The same call after its arguments."""
        return "}" + self._delimiters[1]

    def grammar(
        self, functions: Sequence[tuple[str, Schema | None]], marker: int | None, content: Schema | None = None
    ) -> str:
        """Return llguidance's Lark grammar of exactly one call of these (name, JSON schema of the arguments).

        `marker`: token id of `start` if that is a special token. `content`: schema of JSON that may be generated
        instead of a call. Each schema is a document of its own, so its references stay within it.
        """
        special = f"<[{marker}]> " if marker is not None and not self.bare else ""
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        rules = [f"start: {special}({calls}){' | content' if content is not None else ''}"]
        for i, (name, schema) in enumerate(functions):
            head = self.head(name).removeprefix(self.start if special else "")
            rules += [f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps(self.tail)}"]
            rules += [_json_rule(f"arguments_{i}", schema or _NO_ARGUMENTS)]
        if content is not None:
            rules.append(_json_rule("content", content))
        return "\n".join(rules) + "\n"


def _json_rule(name: str, schema: Schema) -> str:
    return f"{name}: {json_expression(schema)}"


def json_expression(schema: Schema) -> str:
    """Return JSON of a schema, on one line, as an expression of a Lark grammar."""
    return f"%json {json.dumps({'x-guidance': ONE_LINE, **schema})}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA = CallFormat("llama", "<|python_tag|>", "", key="parameters", bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", id_length=9)
FENCED = CallFormat("fenced", "```json", "\n```")
"""Format that Qwen2.5-Coder uses in place of its own family's."""


def family(template: str | None) -> CallFormat:
    """Return the format of a chat template's family, by default Hermes', which `with_tools` describes to the model."""
    template = template or ""
    if HERMES.start in template:
        return HERMES
    if MISTRAL.start in template:
        return MISTRAL
    llama = LLAMA.start in template or ("ipython" in template and "<|start_header_id|>" in template)
    return LLAMA if llama else HERMES


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
