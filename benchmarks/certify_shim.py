"""Serve a library's `generate` behind OpenAI's API, so that `paceline certify` can test its speculation.

    python benchmarks/certify_shim.py transformers model.gguf --port 8090
    paceline certify http://127.0.0.1:8090/v1 --body '{"prompt_lookup": 5}' --plain-body '{}'

Libraries: transformers, openvino (openvino-genai), llama-cpp-python, and paceline-rules, because `paceline serve`
offers no acceptance rules. `speculation` of a library lists the fields that enable it. The server passes
parameters on unchanged, refuses unknown fields, and answers one request at a time.
"""

from __future__ import annotations

import argparse
import json
import threading
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

COMMON = {"messages", "model", "max_tokens", "temperature", "top_p", "seed", "stop"}
Body = dict[str, Any]


class Transformers:
    """A transformers model in float32."""

    packages = ("transformers", "torch")
    fields = COMMON | {"logprobs", "top_logprobs"}
    speculation = ("prompt_lookup", "early_exit")

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.is_file():
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.torch: Any = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        self.model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
        self.layers = self.model.config.num_hidden_layers

    def answer(self, body: Body) -> Body:
        """Return the completion of a request."""
        inputs = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        temperature = body.get("temperature", 1.0)
        options: Body = {"do_sample": temperature > 0, "max_new_tokens": body.get("max_tokens") or 64}
        if temperature > 0:
            options |= {"temperature": temperature, "top_p": body.get("top_p", 1.0), "top_k": 0}
        if stop := body.get("stop"):
            options |= {"stop_strings": stop, "tokenizer": self.tokenizer}
        arguments = {"prompt_lookup": "prompt_lookup_num_tokens", "early_exit": "assistant_early_exit"}
        options |= {argument: body[field] for field, argument in arguments.items() if field in body}
        scored = bool(body.get("logprobs"))
        with self.torch.inference_mode():
            self.torch.manual_seed(body.get("seed") or self.torch.seed() % 2**32)
            # After an error during early-exit drafting, the model would lack its upper layers.
            self.model.config.num_hidden_layers = self.layers
            done = self.model.generate(**inputs, return_dict_in_generate=True, output_logits=scored, **options)
        prompt = inputs["input_ids"].shape[1]
        new = done.sequences[0, prompt:]
        ended = bool(len(new)) and int(new[-1]) == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        choice = _choice(text, body, ended)
        if scored:
            choice["logprobs"] = {"content": self._scores(new, done.logits, body.get("top_logprobs") or 0)}
        return _answer(choice, prompt, len(new))

    def _scores(self, new: Any, logits: Any, count: int) -> list[Body]:
        rows = []
        for token, row in zip(new.tolist(), logits, strict=False):
            logprobs = row[0].float().log_softmax(-1)
            best = logprobs.topk(count)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            top = [{"token": self.tokenizer.decode([i]), "logprob": value} for value, i in pairs]
            text = self.tokenizer.decode([token])
            rows.append({"token": text, "logprob": float(logprobs[token]), "top_logprobs": top})
        return rows


class OpenVino:
    """Two OpenVINO GenAI pipelines, one with prompt lookup. They use float32, also for the cache and activations."""

    packages = ("openvino_genai", "openvino")
    fields = COMMON | {"presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"}
    speculation = ("prompt_lookup",)

    def __init__(self, path: Path) -> None:
        import openvino_genai

        self.genai: Any = openvino_genai
        self.plain, self.speculative = (self._load(path, prompt_lookup) for prompt_lookup in (False, True))
        self.tokenizer: Any = self.plain.get_tokenizer()
        self.requests = 0

    def _load(self, path: Path, prompt_lookup: bool) -> Any:
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = 1
        options: Body = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
        options |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} | ({"prompt_lookup": True} if prompt_lookup else {})
        return self.genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", options)

    def answer(self, body: Body) -> Body:
        """Return the completion of a request."""
        config = self.genai.GenerationConfig()
        config.apply_chat_template, config.max_new_tokens = False, body.get("max_tokens") or 64
        config.do_sample = body.get("temperature", 1.0) > 0
        if config.do_sample:
            config.temperature, config.top_p = body.get("temperature", 1.0), body.get("top_p", 1.0)
            config.rng_seed = body.get("seed") or 0
        for name in body.keys() & {"presence_penalty", "frequency_penalty"}:
            setattr(config, name, body[name])
        config.stop_strings, config.logprobs = {*(body.get("stop") or ())}, bool(body.get("logprobs"))
        pipeline = self.plain
        if drafted := body.get("prompt_lookup"):
            config.num_assistant_tokens, config.max_ngram_size, pipeline = drafted, 3, self.speculative
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        self.requests += 1
        running = pipeline.add_request(self.requests, prompt, config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        done = running.read_all()[0]
        text = self.tokenizer.decode(done.generated_ids)
        choice = _choice(text, body, done.finish_reason == self.genai.GenerationFinishReason.STOP)
        if config.logprobs:
            rows = zip(done.generated_ids, done.generated_log_probs, strict=False)
            content = [{"token": self.tokenizer.decode([i]), "logprob": float(value)} for i, value in rows]
            choice["logprobs"] = {"content": content}
        return _answer(choice, self.tokenizer.encode(prompt).input_ids.shape[1], len(done.generated_ids))


class LlamaCppPython:
    """llama-cpp-python, with and without its prompt lookup. It already answers in OpenAI's format."""

    packages = ("llama_cpp",)
    fields = COMMON | {"logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "tools"}
    speculation = ("prompt_lookup",)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plain = self._load()

    def _load(self, **options: Any) -> Any:
        from llama_cpp import Llama

        return Llama(str(self.path), n_ctx=4096, logits_all=True, verbose=False, **options)

    @cached_property
    def speculative(self) -> Any:
        """The same model with prompt lookup."""
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return self._load(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5))

    def answer(self, body: Body) -> Body:
        """Return the completion of a request."""
        given = {name: value for name, value in body.items() if name not in ("model", *self.speculation)}
        model = self.speculative if body.get("prompt_lookup") else self.plain
        answer: Body = model.create_chat_completion(**given)
        return answer


class Paceline:
    """Paceline with its EAGLE-3 head. Each request can choose an acceptance rule."""

    packages = ("paceline",)
    fields = COMMON | {"presence_penalty", "frequency_penalty"}
    speculation = ("rule",)

    def __init__(self, path: Path) -> None:
        import paceline

        # Without a prefix cache, both read every prompt from its beginning.
        self.speculative = paceline.load(str(path), drafter="eagle3", prefix_memory=0)
        self.plain = paceline.load(str(path), drafter="none", prefix_memory=0)

    def answer(self, body: Body) -> Body:
        """Return the completion of a request."""
        model = self.speculative if "rule" in body else self.plain
        given = {name: value for name, value in body.items() if name not in ("model", "messages", "max_tokens")}
        done = model.generate(body["messages"], max_new_tokens=body.get("max_tokens") or 64, **given)
        choice = _choice(done.text, {}, done.finish_reason != "length")
        return _answer(choice, done.prompt_tokens, len(done.token_ids))


def _choice(text: str, body: Body, ended: bool) -> Body:
    cut = [text.index(one) for one in body.get("stop") or () if one in text]
    message = {"role": "assistant", "content": text[: min(cut, default=None)]}
    return {"index": 0, "message": message, "finish_reason": "stop" if ended or cut else "length"}


def _answer(choice: Body, prompt: int, new: int) -> Body:
    return {"choices": [choice], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}


LIBRARIES: dict[str, Any] = {
    "transformers": Transformers,
    "openvino": OpenVino,
    "llama-cpp-python": LlamaCppPython,
    "paceline-rules": Paceline,
}


class Handler(BaseHTTPRequestHandler):
    """HTTP handler for /v1/models, /version and /v1/chat/completions."""

    library: Any
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/version":
            self._send(
                200,
                {"version": ", ".join(f"{name} {import_module(name).__version__}" for name in self.library.packages)},
            )
        elif self.path == "/v1/models":
            self._send(200, {"data": [{"id": "model", "owned_by": "shim"}]})
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": "no such path"}})
        elif unknown := body.keys() - self.library.fields - {*self.library.speculation}:
            self._send(400, {"error": {"message": f"{min(unknown)} is not supported"}})
        else:
            try:
                with self.lock:
                    answer = self.library.answer(body)
            except (ValueError, RuntimeError) as error:
                self._send(400, {"error": {"message": str(error)}})
            else:
                self._send(200, answer)

    def _send(self, status: int, answer: Body) -> None:
        data = json.dumps(answer, default=float).encode()  # converts numpy numbers
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    Handler.library = LIBRARIES[given.library](given.model)
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
