"""Functions that a model may call: how a family of models writes a call, told by its chat template.

The forms are those of the families' own chat templates: Hermes, Qwen2.5, Qwen3 and SmolLM2 write `<tool_call>` JSON
`</tool_call>`, Llama 3 a JSON object with "parameters" (behind `<|python_tag|>` or not), Mistral `[TOOL_CALLS]` and a
JSON list, or a name and JSON. `calls.py` reads them again.
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
"""Of a function without `parameters`, as OpenAI's API defines it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls. `opens`, `closes`: what stands around one ("": the text's end). `bare`: a text that
    begins with "{" is a call too. `key`: of the arguments. `id_length`: of a call's id, "call_" before it if long."""

    name: str
    opens: str
    closes: str
    key: str = "arguments"
    bare: bool = False
    id_length: int = 24

    def new_id(self) -> str:
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return made if self.id_length < 24 else f"call_{made}"

    @property
    def _around(self) -> tuple[str, str]:
        """What stands before and after a call's object."""
        if self.closes:
            return f"{self.opens}\n", f"\n{self.closes}"
        return ("", "") if self.bare else (f"{self.opens}[", "]")

    def head(self, name: str) -> str:
        """A call written by `grammar`, up to its arguments."""
        return f'{self._around[0]}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """The same call after its arguments."""
        return "}" + self._around[1]

    def grammar(
        self, functions: Sequence[tuple[str, Schema | None]], marker: int | None, content: Schema | None = None
    ) -> str:
        """Exactly one call of one of these (name, JSON schema of its arguments), as a Lark grammar of llguidance's.

        `marker`: the token that `opens` is, if it is one that a text does not show. `content`: the schema of JSON that
        may be written instead of a call. Each schema is a document of its own, so its references stay within it.
        """
        special = f"<[{marker}]> " if marker is not None and not self.bare else ""
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        rules = [f"start: {special}({calls}){' | content' if content is not None else ''}"]
        for i, (name, schema) in enumerate(functions):
            head = self.head(name).removeprefix(self.opens if special else "")
            rules += [f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps(self.tail)}"]
            rules += [_json_rule(f"arguments_{i}", schema or _NO_ARGUMENTS)]
        if content is not None:
            rules.append(_json_rule("content", content))
        return "\n".join(rules) + "\n"


def _json_rule(name: str, schema: Schema) -> str:
    return f"{name}: %json {json.dumps({'x-guidance': ONE_LINE, **schema})}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA = CallFormat("llama", "<|python_tag|>", "", key="parameters", bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", id_length=9)
FENCED = CallFormat("fenced", "```json", "\n```")
"""What Qwen2.5-Coder writes in place of its own family's form."""


def family(template: str | None) -> CallFormat:
    """The family of a chat template; Hermes' form where it knows no calls (`with_tools` then tells the model)."""
    template = template or ""
    if HERMES.opens in template:
        return HERMES
    if MISTRAL.opens in template:
        return MISTRAL
    llama = LLAMA.opens in template or ("ipython" in template and "<|start_header_id|>" in template)
    return LLAMA if llama else HERMES


def knows_tools(template: str | None) -> bool:
    """Whether the template itself tells the model of the tools."""
    return bool(re.search(r"\btools\b", template or ""))


_TELL = """You can call these functions. To call one, write a JSON object within these tags, and nothing else:
<tool_call>
{"name": <its name>, "arguments": <its arguments as an object>}
</tool_call>
The functions:
<tools>
%s
</tools>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """The same chat for a template that knows no tools: the functions in the system message, calls and results as text
    in Hermes' form."""
    told = _TELL % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) if tools else ""
    chat = [_as_text(message) for message in messages]
    if not told:
        return chat
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{told}"}, *chat[1:]]
    return [{"role": "system", "content": told}, *chat]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join([*([text] if text or not calls else []), *calls])}
