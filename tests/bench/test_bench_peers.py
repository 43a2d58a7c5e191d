"""The arguments given to other programs. Stand-ins replace programs that are not installed; transformers is real."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from paceline.bench.peers import PeerPrompt, PeerSetup, PeerUnavailable, llama_cpp, openvino, transformers
from tests.support.toys import toy_tokenizer

JOB = PeerSetup("model.gguf", (36, 5), 4, 40, 2)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


class FakeLlama:
    """Generates 10, 11, 12, ... or given tokens, and records its arguments."""

    made: ClassVar[list[FakeLlama]] = []
    writes: ClassVar[list[int]] = list(range(10, 30))

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, []
        FakeLlama.made.append(self)

    def reset(self) -> None:
        self.calls.append("reset")

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        assert (add_bos, special) == (False, True), "the prompt is rendered already"
        return list(text)

    def generate(self, ids: list[int], **sampling: Any) -> Iterator[int]:
        self.calls.append((bytes(ids).decode(), sampling["temp"]))
        assert (sampling["top_k"], sampling["top_p"], sampling["min_p"], sampling["repeat_penalty"]) == (
            0,
            1.0,
            0.0,
            1.0,
        )
        return iter(self.writes)

    def detokenize(self, ids: list[int]) -> bytes:
        self.calls.append(tuple(ids))
        return b""


@pytest.fixture
def llamas(monkeypatch: pytest.MonkeyPatch) -> list[FakeLlama]:
    monkeypatch.setattr(FakeLlama, "made", [])
    install(monkeypatch, "llama_cpp", Llama=FakeLlama)
    lookup = SimpleNamespace
    install(monkeypatch, "llama_cpp.llama_speculative", LlamaPromptLookupDecoding=lookup)
    return FakeLlama.made


def test_llama_cpp_forgets_the_previous_prompt_and_stops_at_the_limit(llamas: list[FakeLlama]) -> None:
    answer = llama_cpp(JOB)
    for temperature in (0.0, 0.7):
        reply = answer(PeerPrompt("hé", temperature))
        assert reply.token_ids == [10, 11, 12, 13]
        assert reply.first > 0
    (llama,) = llamas
    assert llama.calls == [x for t in (0.0, 0.7) for x in ("reset", ("hé", t), (10, 11, 12, 13))]
    told = {key: llama.options[key] for key in ("model_path", "n_threads", "n_threads_batch", "draft_model")}
    assert told == {"model_path": "model.gguf", "n_threads": 2, "n_threads_batch": 2, "draft_model": None}
    assert llama.options["n_ctx"] >= JOB.positions


def test_llama_cpp_stops_at_the_same_tokens_as_the_model(
    llamas: list[FakeLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLlama, "writes", [10, 5, 11])
    assert llama_cpp(JOB)(PeerPrompt("a")).token_ids == [10, 5]


def test_llama_cpp_uses_a_separate_model_for_prompt_lookup(llamas: list[FakeLlama]) -> None:
    answer = llama_cpp(JOB)
    answer(PeerPrompt("a", drafter="lookup"))
    answer(PeerPrompt("b", drafter="lookup"))
    assert [m.options["draft_model"] and m.options["draft_model"].num_pred_tokens for m in llamas] == [None, 10]


class FakeConfig(SimpleNamespace):
    def set_eos_token_id(self, token: int) -> None:
        self.eos_token_id = token


class FakePipeline:
    made: ClassVar[list[FakePipeline]] = []

    def __init__(self, path: str, device: str, **options: Any) -> None:
        self.told, self.asked = (path, device, options), []
        FakePipeline.made.append(self)

    def get_tokenizer(self) -> Any:
        def encode(text: str, add_special_tokens: bool) -> str:
            assert not add_special_tokens, "the prompt is rendered already"
            return f"ids of {text}"

        return SimpleNamespace(encode=encode, decode=lambda ids: "")

    def generate(self, ids: str, config: Any, streamer: Any) -> Any:
        self.asked.append((ids, config))
        streamer.write(7)
        streamer.end()
        return SimpleNamespace(tokens=[np.array([7, 8, 36])])


def test_openvino_ends_where_the_model_does_and_drafts_by_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePipeline, "made", [])
    install(
        monkeypatch,
        "openvino_genai",
        LLMPipeline=FakePipeline,
        GenerationConfig=FakeConfig,
        StreamerBase=object,
        StreamingStatus=SimpleNamespace(RUNNING=0),
        SchedulerConfig=SimpleNamespace,
    )
    answer = openvino(JOB)
    asks = [
        PeerPrompt("a"),
        PeerPrompt("b", temperature=0.7, seed=3),
        PeerPrompt("c", drafter="lookup"),
        PeerPrompt("d", drafter="lookup"),
    ]
    replies = [answer(ask) for ask in asks]
    assert all(reply.token_ids == [7, 8, 36] and reply.first > 0 for reply in replies)
    plain, lookup = FakePipeline.made
    forgetful = SimpleNamespace(max_num_batched_tokens=2**31 - 1, enable_prefix_caching=False)
    common = {"INFERENCE_NUM_THREADS": 2, "scheduler_config": forgetful}
    assert plain.told == ("model.gguf", "CPU", common)
    assert lookup.told == ("model.gguf", "CPU", common | {"prompt_lookup": True})
    every = {"max_new_tokens": 4, "apply_chat_template": False, "eos_token_id": 36, "stop_token_ids": {36, 5}}
    assert [(ids, vars(config)) for ids, config in plain.asked] == [
        ("ids of a", every | {"do_sample": False}),
        ("ids of b", every | {"do_sample": True, "temperature": 0.7, "rng_seed": 3}),
    ]
    drafting = every | {"do_sample": False, "num_assistant_tokens": 5, "max_ngram_size": 3}
    assert [vars(config) for _, config in lookup.asked] == [drafting, drafting]


@pytest.mark.parametrize("begin", [llama_cpp, openvino])
def test_peers_that_only_read_gguf_on_cpus_report_it(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "openvino_genai", StreamerBase=object)
    install(monkeypatch, "llama_cpp")
    with pytest.raises(PeerUnavailable, match="folder is not a GGUF file"):
        begin(PeerSetup("folder", (1,), 4, 40, 2))
    with pytest.raises(PeerUnavailable, match=r"the model is on cuda:0\. Add --device cpu"):
        begin(PeerSetup("model.gguf", (1,), 4, 40, 2, "cuda:0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random Llama with one layer and 37 tokens, saved by transformers."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = library.LlamaConfig(vocab_size=37, num_hidden_layers=1, initializer_range=0.5, **sizes)
    path = tmp_path_factory.mktemp("tiny")
    library.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    library.PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer()._backend).save_pretrained(path)
    return path


@pytest.mark.slow
def test_transformers_answers_at_most_so_many_tokens_and_the_same_by_lookup(folder: Path) -> None:
    setup = PeerSetup(str(folder), (99,), 12, 40, torch.get_num_threads())
    answer = transformers(setup)
    plain = answer(PeerPrompt("abcabcabc"))
    assert len(plain.token_ids) == 12
    assert plain.first > 0
    assert answer(PeerPrompt("abcabcabc", drafter="lookup")).token_ids == plain.token_ids
    drawn = [answer(PeerPrompt("abcabcabc", 2.0, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    end = plain.token_ids[3]
    ended = transformers(PeerSetup(str(folder), (end,), 12, 40, torch.get_num_threads()))(PeerPrompt("abcabcabc"))
    assert ended.token_ids == plain.token_ids[: plain.token_ids.index(end) + 1]
