"""transformers' generate behind OpenAI's API, so that `paceline certify` can test it.

    python benchmarks/certify_transformers.py model.gguf --port 8090
    paceline certify http://127.0.0.1:8090/v1 --body '{"prompt_lookup": 10}' --plain-body '{"prompt_lookup": 0}'

The server only passes parameters on: prompt lookup, sampling, stop strings and log-probabilities are transformers' own.
Other fields are refused. One request runs at a time.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KNOWN = {
    *("messages", "model", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "top_logprobs"),
    "prompt_lookup",
}


class Model:
    """A model of transformers in float32."""

    def __init__(self, path: Path) -> None:
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name} if path.is_file() else {}
        where = where or {"pretrained_model_name_or_path": path}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        self.model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
        self.lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the completion of a request."""
        ids = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        temperature = body.get("temperature", 1.0)
        options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": body.get("max_tokens") or 64}
        if temperature > 0:
            options |= {"temperature": temperature, "top_p": body.get("top_p", 1.0), "top_k": 0}
        if lookup := body.get("prompt_lookup"):
            options["prompt_lookup_num_tokens"] = lookup
        if stop := body.get("stop"):
            options |= {"stop_strings": stop, "tokenizer": self.tokenizer}
        with self.lock, torch.inference_mode():
            torch.manual_seed(body.get("seed") or torch.seed() % 2**32)
            done = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                return_dict_in_generate=True,
                output_logits=bool(body.get("logprobs")),
                **options,
            )
        new = done.sequences[0, ids.shape[1] :]
        ended = bool(len(new)) and int(new[-1]) in (
            self.model.generation_config.eos_token_id,
            self.tokenizer.eos_token_id,
        )
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        cut = [text.index(one) for one in stop or () if one in text]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text[: min(cut, default=None)]},
        }
        choice["finish_reason"] = "stop" if ended or cut else "length"
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self._scores(new, done.logits, body.get("top_logprobs") or 0)}
        usage = {"prompt_tokens": ids.shape[1], "completion_tokens": len(new)}
        return {"choices": [choice], "usage": usage}

    def _scores(self, new: torch.Tensor, logits: Any, count: int) -> list[dict[str, Any]]:
        rows = []
        for token, row in zip(new.tolist(), logits, strict=False):
            logprobs = row[0].float().log_softmax(-1)
            best = logprobs.topk(count)
            top = [{"token": self.tokenizer.decode([i]), "logprob": x} for x, i in zip(*map(torch.Tensor.tolist, best))]  # noqa: B905
            rows.append(
                {"token": self.tokenizer.decode([token]), "logprob": float(logprobs[token]), "top_logprobs": top}
            )
        return rows


class Handler(BaseHTTPRequestHandler):
    """Answers /v1/models and /v1/chat/completions."""

    model: Model

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "model", "owned_by": "shim"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if unknown := body.keys() - KNOWN:
            self._send(400, {"error": {"message": f"{min(unknown)} is not supported"}})
            return
        self._send(200, self.model.answer(body))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    Handler.model = Model(given.model)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
