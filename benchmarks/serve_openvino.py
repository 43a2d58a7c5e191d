"""Run OpenVINO GenAI's continuous batching for serve.py, in its own process, without HTTP and without Paceline.

This needs only the package openvino-genai. The arguments are the GGUF file and the number of threads. Each input line
is JSON: {"clients", "spacing", "eos", "requests": [{"prompt", "tokens", "temperature", "seed"}]}. The output line is
{"replies", "full", "dry", "wall"}, as in `load_client.Load`. `clients` sequences are active at a time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openvino_genai as genai


def main() -> None:
    path, threads = sys.argv[1:]
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 2  # GB
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(threads)})
    print(json.dumps({"ready": genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, **json.loads(line))), flush=True)


def run(pipeline: Any, clients: int, spacing: float, eos: list[int], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer all requests. Each client sends its next request when its previous request is answered."""
    began = time.perf_counter()
    tokenizer = pipeline.get_tokenizer()
    replies: list[dict[str, Any]] = [{} for _ in requests]
    active: dict[int, Any] = {}
    asked, full, dry = 0, 0.0, 0.0
    while asked < len(requests) or active:
        now = time.perf_counter()
        entered = min(clients, 1 + int((now - began) / spacing) if spacing else clients)
        while len(active) < entered and asked < len(requests):
            request, when = requests[asked], time.perf_counter()
            ids = tokenizer.encode(request["prompt"], add_special_tokens=False).input_ids
            active[asked] = pipeline.add_request(asked, ids, config(request, eos))
            replies[asked] = {"began": when, "texts": [], "ids": [], "prompt_tokens": ids.shape[1]}
            asked += 1
        full = full or (time.perf_counter() if entered == clients else 0.0)
        if pipeline.has_non_finished_requests():
            pipeline.step()
        for index in list(active):
            if take(active[index], replies[index], tokenizer):
                del active[index]
        if asked == len(requests) and len(active) < clients:
            dry = dry or time.perf_counter()
    return {"replies": replies, "full": full, "dry": dry, "wall": time.perf_counter() - began}


def take(handle: Any, reply: dict[str, Any], tokenizer: Any) -> bool:
    """Collect the new tokens of a reply. Return True if it is finished."""
    while handle.can_read():
        for output in handle.read().values():
            reply["ids"] += output.generated_ids
            reply["texts"].append(time.perf_counter())
    running = handle.get_status() == genai.GenerationStatus.RUNNING
    if running:
        return False
    ids = reply.pop("ids")
    reply |= {"ended": time.perf_counter(), "tokens": len(ids), "text": tokenizer.decode(ids)}
    reply["finish"] = str(handle.get_status()).rsplit(".", 1)[-1].lower()
    return True


def config(request: dict[str, Any], eos: list[int]) -> Any:
    """Return the generation config of a request."""
    found = genai.GenerationConfig()
    found.max_new_tokens = request["tokens"]
    found.apply_chat_template = False
    found.set_eos_token_id(eos[0])
    found.stop_token_ids = set(eos)
    found.do_sample = request["temperature"] > 0
    if found.do_sample:
        found.temperature, found.rng_seed = request["temperature"], request["seed"]
    return found


if __name__ == "__main__":
    main()
