"""Features of each official client with this server, for the tables in docs/reference/clients.md.

`PACELINE_WRITE=1 pytest tests/server/test_clients.py` writes the tables again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.calling import SCHEMA, THINKS, user
from tests.support.filler import filler
from tests.support.running import Serving, serving
from tests.support.scripted import scripted
from tests.support.toys import toy_model
from tests.support.vocabularies import byte_level, speaker

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- clients: made by tests/server/test_clients.py -->\n\n", "\n<!-- end of clients -->"
CLIENTS = ("openai, chat", "openai, responses", "anthropic", "ollama")
COMPLETIONS = ("openai, completions", "ollama, generate")
FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
SKIPPED = "skipped: the reply does not use it"
IGNORED = "ignored, and named in the log"
IMAGE = "iVBORw0KGgo="


def anthropic(it: Serving) -> Any:
    return pytest.importorskip("anthropic").Anthropic(base_url=it.address, api_key="none", max_retries=0)


def ollama(it: Serving) -> Any:
    return pytest.importorskip("ollama").Client(it.address)


@dataclass
class Clients:
    """Clients of four servers: a toy, a model that reasons and calls, a grammar-constrained model, and a
    fill-in-the-middle model. `tables` maps clients to their features."""

    toy: Serving
    caller: Serving
    speaker: Serving
    coder: Serving
    tables: dict[tuple[str, ...], dict[str, list[str]]] = field(default_factory=lambda: {CLIENTS: {}, COMPLETIONS: {}})

    def chat(self, it: Serving, **asked: Any) -> Any:
        return it.openai.chat.completions.create(**{"model": "toy", "messages": [user("abc")], **asked})

    def response(self, it: Serving, **asked: Any) -> Any:
        return it.openai.responses.create(**{"model": "toy", "input": "abc", **asked})

    def message(self, it: Serving, **asked: Any) -> Any:
        return anthropic(it).messages.create(**{"model": "toy", "messages": [user("abc")], "max_tokens": 300, **asked})

    def ollama(self, it: Serving, **asked: Any) -> Any:
        return ollama(it).chat(**{"model": "toy", "messages": [user("abc")], **asked})

    def text(self, it: Serving, **asked: Any) -> Any:
        return it.openai.completions.create(**{"model": "toy", "prompt": "abc", "max_tokens": 8, **asked})

    def prompt(self, it: Serving, **asked: Any) -> Any:
        return ollama(it).generate(**{"model": "toy", "prompt": "abc", "options": {"num_predict": 8}, **asked})

    def row(self, feature: str, *probes: Callable[[], Any] | str) -> None:
        """Add a feature: for each client, a probe that returns True if it worked, or a text without a probe."""
        (table,) = (table for clients, table in self.tables.items() if len(clients) == len(probes))
        table[feature] = [probe if isinstance(probe, str) else outcome(probe) for probe in probes]


def outcome(probe: Callable[[], Any]) -> str:
    import anthropic
    import ollama
    import openai

    try:
        made = probe()
        assert made
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        body: Any = error.body
        return f"refused: {body.get('error', body)['message']}"
    except ollama.ResponseError as error:
        return f"refused: {error.error}"
    return made if made in (SKIPPED, IGNORED) else "works"


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    for module in ("openai", "anthropic", "ollama", "llguidance"):
        pytest.importorskip(module)
    with ExitStack() as stack:
        words = LLM(speaker(byte_level(), seed=3), Suffix())
        models = (LLM(toy_model(), Suffix()), scripted(THINKS), words, filler())
        models[2].model.tokenizer.chat_template = "{# tools #}go:"
        yield Clients(*(stack.enter_context(serving(llm)) for llm in models))


def texts(c: Clients) -> None:
    it = c.toy
    short: Any = {"max_tokens": 8}
    c.row(
        "text",
        lambda: c.chat(it, **short).choices[0].message.content,
        lambda: c.response(it, max_output_tokens=8).output_text,
        lambda: c.message(it, **short).content[0].text,
        lambda: c.ollama(it, options={"num_predict": 8}).message.content,
    )
    c.row(
        "stream",
        lambda: any(e.choices[0].delta.content for e in c.chat(it, stream=True, **short)),
        lambda: "response.output_text.delta" in {e.type for e in c.response(it, stream=True, max_output_tokens=8)},
        lambda: "content_block_delta" in {e.type for e in c.message(it, stream=True, **short)},
        lambda: "".join(e.message.content for e in c.ollama(it, stream=True, options={"num_predict": 8})),
    )
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    own: Any = {"extra_body": {"seed": 7}}
    c.row(
        "temperature, top_p, seed",
        lambda: c.chat(it, **sampled, **short).choices[0] == c.chat(it, **sampled, **short).choices[0],
        lambda: (
            c.response(it, temperature=1.0, max_output_tokens=8, **own).output_text
            == c.response(it, temperature=1.0, max_output_tokens=8, **own).output_text
        ),
        lambda: (
            c.message(it, extra_body=sampled, **short).content == c.message(it, extra_body=sampled, **short).content
        ),
        lambda: (
            c.ollama(it, options={"num_predict": 8, **sampled}).message
            == c.ollama(it, options={"num_predict": 8, **sampled}).message
        ),
    )
    text = c.chat(it, max_tokens=16).choices[0].message.content[6:8]
    c.row(
        "stop strings",
        lambda: c.chat(it, stop=[text], max_tokens=16).choices[0].finish_reason == "stop",
        "not in this API",
        lambda: c.message(it, stop_sequences=[text], max_tokens=16).stop_sequence == text,
        lambda: c.ollama(it, options={"stop": [text], "num_predict": 16}).done_reason == "stop",
    )
    c.row(
        "log-probabilities",
        lambda: len(c.chat(it, logprobs=True, top_logprobs=2, **short).choices[0].logprobs.content) == 8,
        lambda: c.response(it, top_logprobs=2, max_output_tokens=8).output[0].content[0].logprobs,
        "not in this API",
        lambda: c.ollama(it, logprobs=True, options={"num_predict": 8}).logprobs,
    )
    c.row(
        "several replies (n)",
        lambda: len(c.chat(it, n=2, **short).choices) == 2,
        *["not in this API"] * 3,
    )
    prediction: Any = {"type": "content", "content": "abc abc"}
    c.row(
        "predicted outputs",
        lambda: c.chat(it, prediction=prediction, **short).usage.completion_tokens_details,
        *["not in this API"] * 3,
    )
    c.row(
        "conversation stored on the server",
        "not in this API",
        lambda: (
            c.response(it, previous_response_id=c.response(it, max_output_tokens=4).id, max_output_tokens=4).output_text
        ),
        *["not in this API"] * 2,
    )
    c.row(
        "count tokens",
        "not in this API",
        "not in this API",
        lambda: anthropic(it).messages.count_tokens(model="toy", messages=[user("abc")]).input_tokens,
        "not in this API",
    )
    c.row(
        "embeddings",
        lambda: it.openai.embeddings.create(model="toy", input=["abc", "b"]).data[1].embedding,
        "not in this API",
        "not in this API",
        lambda: ollama(it).embed("toy", ["abc", "b"]).embeddings[1],
    )
    c.row(
        "embedding of one text (older endpoint)",
        *["not in this API"] * 3,
        lambda: ollama(it).embeddings("toy", "abc").embedding,
    )
    c.row(
        "list of models",
        lambda: it.openai.models.list().data,
        lambda: it.openai.models.retrieve("toy").id,
        lambda: anthropic(it).models.list().data,
        lambda: ollama(it).list().models,
    )

    c.row(
        "model details",
        lambda: it.openai.models.retrieve("toy").id,
        lambda: it.openai.models.retrieve("toy").id,
        lambda: anthropic(it).models.retrieve("toy").id,
        lambda: ollama(it).show("toy").capabilities,
    )
    c.row("loaded models", *["not in this API"] * 3, lambda: ollama(it).ps().models[0].model == "toy")
    c.row("download a model", *["not in this API"] * 3, lambda: ollama(it).pull("toy").status == "success")


def completions(c: Clients) -> None:
    it = c.toy
    c.row("text", lambda: c.text(it).choices[0].text, lambda: c.prompt(it, raw=True).response)
    c.row(
        "stream",
        lambda: "".join(e.choices[0].text for e in c.text(it, stream=True)) == c.text(it).choices[0].text,
        lambda: "".join(e.response for e in c.prompt(it, raw=True, stream=True)) == c.prompt(it, raw=True).response,
    )
    c.row("several prompts", lambda: c.text(it, prompt=["abc", "b"]).choices[1].text, "not in this API")
    c.row(
        "log-probabilities",
        lambda: c.text(it, logprobs=2).choices[0].logprobs.top_logprobs,
        lambda: c.prompt(it, raw=True, logprobs=True).logprobs,
    )
    c.row("echo", lambda: c.text(it, echo=True).choices[0].text.startswith("abc"), "not in this API")
    c.row(
        "echo with log-probabilities of the prompt",
        lambda: len(c.text(it, echo=True, logprobs=0).choices[0].logprobs.token_logprobs) == 3 + 8,
        "not in this API",
    )
    c.row("best_of", lambda: len(c.text(it, best_of=3, temperature=1.0).choices) == 1, "not in this API")
    c.row(
        "suffix",
        lambda: c.text(c.coder, suffix="x").choices[0].text,
        lambda: c.prompt(c.coder, suffix="x").response,
    )


def calls(c: Clients) -> None:
    it, tool = c.caller, {"type": "function", "function": FUNCTION}
    flat: Any = {"type": "function", **FUNCTION}
    named: Any = {"name": "add", "input_schema": SCHEMA}
    c.row(
        "function calls",
        lambda: c.chat(it, tools=[tool]).choices[0].message.tool_calls,
        lambda: c.response(it, tools=[flat]).output[-1].type == "function_call",
        lambda: c.message(it, tools=[named]).stop_reason == "tool_use",
        lambda: c.ollama(it, tools=[tool]).message.tool_calls,
    )
    c.row(
        "function calls in a stream",
        lambda: any(e.choices[0].delta.tool_calls for e in c.chat(it, tools=[tool], stream=True)),
        lambda: "response.function_call_arguments.done" in {e.type for e in c.response(it, tools=[flat], stream=True)},
        lambda: "input_json_delta" in deltas(c.message(it, tools=[named], stream=True)),
        lambda: any(e.message.tool_calls for e in c.ollama(it, tools=[tool], stream=True)),
    )
    c.row(
        "reasoning separate from the text",
        lambda: c.chat(it).choices[0].message.reasoning_content == "I add.",
        lambda: c.response(it).output[0].content[0].text == "I add.",
        lambda: c.message(it).content[0].thinking == "I add.",
        lambda: c.ollama(it).message.thinking == "I add.",
    )
    c.row(
        "reasoning in a stream",
        lambda: any(getattr(e.choices[0].delta, "reasoning_content", "") for e in c.chat(it, stream=True)),
        lambda: "response.reasoning_text.delta" in {e.type for e in c.response(it, stream=True)},
        lambda: "thinking_delta" in deltas(c.message(it, stream=True)),
        lambda: any(e.message.thinking for e in c.ollama(it, stream=True)),
    )
    counts = [c.chat(it, max_tokens=1).usage.prompt_tokens, c.ollama(it, options={"num_predict": 1}).prompt_eval_count]
    assert counts[0] == counts[1]
    c.row(
        "reasoning switched off",
        lambda: c.chat(it, reasoning_effort="none", max_tokens=1).usage.prompt_tokens > counts[0],
        lambda: c.response(it, reasoning={"effort": "none"}, max_output_tokens=1).usage.input_tokens > counts[0],
        lambda: c.message(it, thinking={"type": "disabled"}).usage.input_tokens > counts[0],
        lambda: c.ollama(it, think=False).prompt_eval_count > counts[0],
    )
    it = c.speaker
    c.row(
        "forced function call",
        lambda: c.chat(it, tools=[tool], tool_choice="required", max_tokens=90).choices[0].message.tool_calls,
        lambda: c.response(it, tools=[flat], tool_choice="required", max_output_tokens=90).output,
        lambda: c.message(it, tools=[named], tool_choice={"type": "any"}).content[0].input,
        "not in this API",
    )
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    c.row(
        "JSON from a schema",
        lambda: json.loads(c.chat(it, response_format=form, max_tokens=60).choices[0].message.content),
        lambda: json.loads(
            c.response(
                it, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, max_output_tokens=60
            ).output_text
        ),
        lambda: json.loads(
            c.message(it, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).content[0].text
        ),
        lambda: json.loads(c.ollama(it, format=SCHEMA, options={"num_predict": 60}).message.content),
    )


def deltas(events: Any) -> set[str]:
    return {event.delta.type for event in events if event.type == "content_block_delta"}


def refusals(c: Clients) -> None:
    it = c.toy
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    c.row(
        "images",
        lambda: c.chat(it, messages=[{"role": "user", "content": [url]}]),
        lambda: c.response(it, input=[{"role": "user", "content": [part]}]),
        lambda: c.message(it, messages=[{"role": "user", "content": [block]}]),
        lambda: c.ollama(it, messages=[{**user("a"), "images": [IMAGE]}]),
    )
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    c.row(
        "provider-side tools (web search)",
        lambda: c.chat(it, extra_body={"web_search_options": {}}),
        lambda: c.response(it, tools=[{"type": "web_search"}], max_output_tokens=4).output_text and SKIPPED,
        lambda: c.message(it, tools=[search], max_tokens=4).content and SKIPPED,
        "not in this API",
    )
    c.row(
        "audio, background, containers",
        lambda: c.chat(it, modalities=["text", "audio"]),
        lambda: c.response(it, background=True),
        lambda: c.message(it, extra_body={"container": "c"}),
        "not in this API",
    )
    c.row(
        "a misspelt parameter",
        lambda: c.chat(it, extra_body={"temprature": 1}),
        lambda: c.response(it, extra_body={"temprature": 1}),
        lambda: c.message(it, extra_body={"temprature": 1}),
        lambda: c.ollama(it, options={"temprature": 1}) and IGNORED,
    )


def test_the_tables_in_the_docs_match_the_clients_results(clients: Clients) -> None:
    for fill in (texts, calls, refusals, completions):
        fill(clients)
    table = "\n".join(
        "\n".join(
            [f"| {' | '.join(('', *names))} |", "|---" * (1 + len(names)) + "|"]
            + [f"| {' | '.join((feature, *cells))} |" for feature, cells in found.items()]
        )
        + "\n"
        for names, found in clients.tables.items()
    )
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if os.environ.get("PACELINE_WRITE"):
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")
    else:
        assert rest.partition(END)[0] == table
