from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import paceline.llm
from paceline.checkpoints.loader import Loaded, _stored_type, pick_device, pick_dtype
from paceline.drafters.cross import SharedTokenDrafter
from paceline.drafters.factory import make_drafter, to_tree
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.engine.detokenizer import Chunk
from paceline.errors import InvalidOption, InvalidPrompt, NonFiniteLogits, PromptTooLong
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.cover import some
from tests.support.fuzz_files import _write_model
from tests.support.toys import toy_foreigner, toy_llm, toy_model

SHORT = Sampling(max_new_tokens=24)


@pytest.fixture
def llm() -> LLM:
    return toy_llm(Suffix(), DraftBudget.chain(4))


def test_text_messages_and_ids_are_prompts(llm: LLM) -> None:
    text = llm.generate("hello", SHORT)
    chat = llm.generate([{"role": "user", "content": "hello"}], SHORT)
    ids = llm.generate(llm.tokenizer.encode("<user:hello><a:"), SHORT)
    raw = llm.generate("<user:hello><a:", SHORT, raw=True)
    assert text.token_ids == chat.token_ids == ids.token_ids == raw.token_ids
    assert text.text == llm.tokenizer.decode(text.token_ids)
    assert text.prompt_tokens == len("<user:hello><a:")
    assert llm.generate("hello", SHORT, raw=True).token_ids != text.token_ids


@pytest.mark.parametrize("prompt", ["", [], [-1], [37], [1.5], [True], [{"role": "user"}], [{"content": "x"}]])
def test_prompts_that_are_none(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidPrompt):
        llm.generate(prompt, SHORT)
    assert llm.generate("hello", SHORT).token_ids


def test_a_prompt_that_fills_the_context_is_too_long() -> None:
    llm = toy_llm(context_length=20)
    with pytest.raises(PromptTooLong, match="20 tokens"):
        llm.generate([1] * 20, SHORT)
    assert len(llm.generate([1] * 19, SHORT).token_ids) == 1


def test_a_stream_joins_to_the_completion(llm: LLM) -> None:
    whole = llm.generate("hello", SHORT)
    stream = llm.stream("hello", SHORT)
    chunks = list(stream)
    assert "".join(c.text for c in chunks) == whole.text == stream.completion.text
    assert [c.token_id for c in chunks] == whole.token_ids == stream.completion.token_ids
    assert sum(c.drafted for c in chunks) == whole.stats.accepted
    assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]
    assert next(stream, None) is None


def test_the_seconds_of_a_request_sum_to_its_wall_time(llm: LLM) -> None:
    import time

    began = time.perf_counter()
    stats = llm.generate("hello", SHORT).stats
    wall = time.perf_counter() - began
    assert 0 < sum(stats.seconds.values()) <= wall


def stops_after(count: int, how: Callable[[], object]) -> Callable[[Chunk], object]:
    seen = []

    def on_chunk(chunk: Chunk) -> object:
        seen.append(chunk)
        return how() if len(seen) == count else None

    return on_chunk


def fail(error: BaseException) -> Callable[[], object]:
    def how() -> object:
        raise error

    return how


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_callback_that_returns_false_ends_the_reply(llm: LLM, count: int) -> None:
    whole = llm.generate("hello", SHORT)
    part = llm.generate("hello", SHORT, on_chunk=stops_after(count, lambda: False))
    assert part.finish_reason == "cancelled"
    assert part.token_ids == whole.token_ids[:count]
    assert whole.text.startswith(part.text)
    assert llm.generate("hello", SHORT).token_ids == whole.token_ids


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mine")])
def test_an_exception_in_a_callback_leaves_the_model_ready(llm: LLM, error: BaseException) -> None:
    whole = llm.generate("hello", SHORT)
    with pytest.raises(type(error)):
        llm.generate("hello", SHORT, on_chunk=stops_after(5, fail(error)))
    assert llm.generate("hello", SHORT).token_ids == whole.token_ids
    assert len(llm.engine.cache.lengths) == 1


@pytest.mark.parametrize("after", range(1, 8))
def test_an_interrupt_inside_a_pass_leaves_the_model_ready(
    llm: LLM, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate("hello", SHORT)
    calls, honest = 0, llm.model.target.forward

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(llm.model.target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", SHORT)
    monkeypatch.undo()
    assert llm.generate("hello", SHORT).token_ids == whole.token_ids
    assert len(llm.engine.cache.lengths) == 1


def test_a_stream_closed_early_leaves_the_model_ready(llm: LLM) -> None:
    whole = llm.generate("hello", SHORT)
    for close in (lambda s: s.close(), lambda s: s.__exit__(None, None, None), lambda s: s.__del__()):
        stream = llm.stream("hello", SHORT)
        next(stream)
        close(stream)
        close(stream)
        assert stream.completion.finish_reason == "cancelled"
        assert list(stream) == []
    llm.stream("hello", SHORT)  # never iterated
    assert llm.generate("hello", SHORT).token_ids == whole.token_ids
    assert len(llm.engine.cache.lengths) == 1


def test_two_streams_may_be_open_at_once(llm: LLM) -> None:
    prompts = ("hello", "what is it? what is it?")
    alone = [llm.generate(p, SHORT).token_ids for p in prompts]
    streams = [llm.stream(p, SHORT) for p in prompts]
    for _ in range(30):
        for stream in streams:
            next(stream, None)
    assert [s.completion.token_ids for s in streams] == alone


def test_an_error_carries_what_was_written(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("hello", SHORT)
    calls, honest = 0, llm.model.target.forward

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        out = honest(*args)
        return type(out)(out.logits * torch.nan) if calls == 6 else out

    monkeypatch.setattr(llm.model.target, "forward", broken)
    with pytest.raises(NonFiniteLogits, match="float32") as caught:
        llm.generate("hello", SHORT)
    partial = caught.value.partial
    assert partial is not None
    assert partial.token_ids
    assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]


def test_a_seed_repeats_the_text_and_none_draws_one() -> None:
    llm = toy_llm(Suffix())
    warm = Sampling(max_new_tokens=24, temperature=1.0)
    first = llm.generate("hello", warm)
    again = llm.generate("hello", Sampling(max_new_tokens=24, temperature=1.0, seed=first.stats.seed))
    other = llm.generate("hello", warm)
    assert first.token_ids == again.token_ids
    assert other.stats.seed != first.stats.seed
    assert other.token_ids != first.token_ids


def test_a_recommended_top_k_of_minus_one_is_all_tokens() -> None:
    llm = LLM(toy_model({"do_sample": True, "top_k": -1}))
    assert (llm.sampling().top_k, llm.sampling().temperature) == (0, 1.0)


def test_without_a_sampling_the_model_s_recommendation_applies() -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    llm = LLM(toy_model(generation))
    assert llm.generate("hello", SHORT).token_ids == LLM(toy_model()).generate("hello", SHORT).token_ids, "as it is"
    assert llm.sampling(seed=3, top_k=7) == Sampling(temperature=0.6, top_p=0.9, top_k=7, seed=3)
    warm = Sampling(temperature=0.6, top_p=0.9, top_k=20, seed=3, max_new_tokens=24)
    wanted = llm.generate("hello", warm).token_ids
    assert wanted != llm.generate("hello", SHORT).token_ids
    assert llm.generate("hello", seed=3, max_new_tokens=24).token_ids == wanted
    assert llm.generate(["hello"], seed=3, max_new_tokens=24)[0].token_ids == wanted
    assert LLM(toy_model({"temperature": 0.6, "do_sample": False})).sampling() == Sampling()
    # transformers leaves its own default out of the file.
    assert LLM(toy_model({"do_sample": True, "top_p": 0.9})).sampling() == Sampling(temperature=1.0, top_p=0.9)
    with pytest.raises(InvalidOption, match=r"generation_config.json of toy is invalid: top_p"):
        LLM(toy_model({"do_sample": True, "top_p": 7})).generate("hello")


def test_sampling_parameters_as_keywords(llm: LLM) -> None:
    wanted = llm.generate("hello", replace(SHORT, max_new_tokens=5)).token_ids
    assert llm.generate("hello", max_new_tokens=5).token_ids == wanted
    assert llm.generate("hello", SHORT, max_new_tokens=5).token_ids == wanted, "keywords change a Sampling"
    assert [c.token_id for c in llm.stream("hello", max_new_tokens=5)] == wanted
    assert [c.token_ids for c in llm.generate(["hello"], [SHORT], n=2, max_new_tokens=5)] == [wanted] * 2
    with llm.batch(["hello"], max_new_tokens=5) as batch:
        list(batch)
    assert batch.completions[0].token_ids == wanted
    for name, near in (("max_tokens", "max_new_tokens"), ("temprature", "temperature")):
        with pytest.raises(InvalidOption, match=f"'{name}' is not a sampling parameter. Did you mean .*{near}"):
            llm.generate("hello", **{name: 5})
    with pytest.raises(InvalidOption, match="max_new_tokens"):
        llm.generate("hello", max_new_tokens=-1)
    with pytest.raises(InvalidOption, match=r"'foo' is not a sampling parameter\. Available: max_new_tokens, temp"):
        llm.generate("hello", foo=1)


def test_values_that_the_server_takes_are_taken_here(llm: LLM) -> None:
    drawn = replace(SHORT, temperature=1.0, seed=-1)
    assert llm.generate("hello", drawn).token_ids == llm.generate("hello", drawn, seed=2**63 - 1).token_ids
    assert llm.generate("hello", drawn).token_ids != llm.generate("hello", drawn, seed=1).token_ids
    greedy = llm.generate("hello", SHORT, temperature=0.0).token_ids
    assert llm.generate("hello", drawn, top_p=0.0).token_ids == greedy, "the likeliest token is left"


@pytest.mark.model
@some(
    "case",
    {
        "auto": ("auto", "suffix"),
        "several": ("ngram+auto", "ngram+suffix"),
        "none": (None, "none"),
        "own": (NGram(), "NGram"),
    },
    fast=["several", "own"],
)
def test_the_drafter_has_a_name(case: tuple[Any, str]) -> None:
    asked, name = case
    llm = paceline.load("demo", drafter=asked)
    assert llm.drafter == name
    drafter = llm.generate("Hi", max_new_tokens=2).stats.drafter
    assert drafter == (None if name == "none" else name)


def test_a_completion_as_json(llm: LLM) -> None:
    row = json.loads(json.dumps(llm.generate("hello", SHORT).as_dict()))
    assert list(row) == ["token_ids", "text", "finish_reason", "stats"]
    assert set(row["stats"]["seconds"]) == {"prefill", "draft", "verify", "commit", "other"}


def test_words_and_logprobs_go_through_the_tokenizer_and_the_stream(llm: LLM) -> None:
    plain = llm.generate("hello", SHORT)
    pair = plain.text[1:3]
    banned = llm.generate("hello", replace(SHORT, bad_words=[pair], logprobs=1))
    assert pair in plain.text
    assert pair not in banned.text
    assert plain.logprobs is None
    assert banned.logprobs is not None
    assert len(banned.logprobs) == len(banned.token_ids)
    assert json.loads(json.dumps(banned.as_dict()))["logprobs"][0].keys() == {"chosen", "top"}
    with pytest.raises(InvalidOption, match="logit_bias contains 37"):
        llm.stream("hello", replace(SHORT, logit_bias={37: 1.0}))


def test_a_criterion_that_fails_leaves_the_model_ready(llm: LLM) -> None:
    def broken(ids: object, text: str) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate("hello", replace(SHORT, stop_when=broken))
    ended = llm.generate("hello", replace(SHORT, stop_when=lambda ids, text: len(text) > 3))
    assert ended.finish_reason == "stop"
    assert len(ended.text) == 4


def loader(**changes: int) -> Callable[[str], Loaded]:
    return lambda reference: toy_model(**changes)


def test_drafters_by_name() -> None:
    target = toy_model()
    make = lambda spec: make_drafter(spec, target, loader())  # noqa: E731
    assert make(None) is make("none") is None
    assert isinstance(make("auto"), Suffix)
    assert isinstance(make("ngram"), NGram)
    assert isinstance(make("model:a+b"), DraftModel)
    stack = make("suffix+model:x")
    assert isinstance(stack, DrafterStack)
    own = NGram()
    assert make(own) is own
    for wrong in ("eagle9", "", "model:", "suffix+", "ngram,suffix"):
        with pytest.raises(InvalidOption):
            make(wrong)


def test_another_tokenizer_of_the_same_size_is_noticed() -> None:
    target = toy_model()
    for other, kind in ((toy_model(), DraftModel), (toy_foreigner(), SharedTokenDrafter)):
        assert type(make_drafter("model:x", target, lambda reference, other=other: other)) is kind


@pytest.mark.parametrize("padded", [37, 40, 64])
def test_padded_vocabularies_of_one_tokenizer_are_fine(padded: int) -> None:
    target = toy_model()
    drafter = make_drafter("model:x", target, loader(vocab_size=padded))
    plain = LLM(target).generate("hello", Sampling(max_new_tokens=24, temperature=2.0, seed=1))
    drafted = LLM(target, drafter, DraftBudget(8, 3, 3)).generate(
        "hello", Sampling(max_new_tokens=24, temperature=2.0, seed=1)
    )
    assert drafted.token_ids == plain.token_ids


def test_draft_sizes() -> None:
    assert to_tree(3) == DraftBudget.chain(3)
    assert to_tree("auto") is None
    assert to_tree(DraftBudget(8, 3, 2)) == DraftBudget(8, 3, 2)
    for wrong in (-1, True, 2.5, "much", 513):
        with pytest.raises(InvalidOption):
            to_tree(wrong)  # type: ignore[arg-type]


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pick_device("cpu")
    monkeypatch.setattr("paceline.checkpoints.loader.fast_bfloat16", lambda: True)
    monkeypatch.setattr("paceline.checkpoints.loader.packs_bfloat16", lambda: False)
    assert pick_dtype("auto", cpu) == torch.bfloat16
    assert pick_dtype("auto", cpu, by_torch=True) == torch.float32, "the kernels are not transformers'"
    assert pick_dtype("float16", cpu) == torch.float16
    for wrong in ("tpu", "cuda" if not torch.cuda.is_available() else "mps"):
        with pytest.raises(InvalidOption, match=wrong):
            pick_device(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="int3"):
        pick_dtype("int3", cpu)  # type: ignore[arg-type]


def test_the_package_is_light_until_it_is_used() -> None:
    import subprocess
    import sys

    code = "import sys, paceline; sys.exit(bool({'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(paceline.__all__) <= set(dir(paceline))
    assert all(getattr(paceline, name) for name in paceline.__all__)
    with pytest.raises(AttributeError):
        _ = paceline.nothing


def test_an_empty_reply_may_be_asked_for() -> None:
    llm = toy_llm()
    reply = llm.generate("abc", max_new_tokens=0)
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("", [], "length")
    replies = llm.generate(["abc", "bca", "cab"], [Sampling(max_new_tokens=n) for n in (3, 0, 2)])
    assert [len(reply.token_ids) for reply in replies] == [3, 0, 2]
    assert list(llm.stream("abc", max_new_tokens=0)) == []
    assert not llm.engine.cache.lengths or not any(llm.engine.cache.lengths), "the slot was given back"


def test_one_reply_of_a_batch_is_halted_and_the_others_go_on() -> None:
    llm = toy_llm()
    alone = llm.generate(["abc", "bca"], max_new_tokens=12, ignore_eos=True)
    seen: list[int] = []

    def watch(index: int, chunk: Chunk) -> bool:
        seen.append(index)
        return not (index == 0 and seen.count(0) == 3)

    halted, whole = llm.generate(["abc", "bca"], max_new_tokens=12, ignore_eos=True, on_chunk=watch)
    assert (halted.token_ids, halted.finish_reason) == (alone[0].token_ids[:3], "cancelled")
    assert whole.token_ids == alone[1].token_ids
    assert seen.count(0) == 3


def test_a_name_and_a_repr_tell_target_drafter_size_and_guarantee() -> None:
    llm = LLM(toy_model(), Suffix(), DraftBudget.chain(4))
    assert llm.name in repr(llm)
    assert str(llm.model.path) in repr(llm)
    assert llm.name.endswith(f" + Suffix, draft 4, {llm.guarantee}")
    assert "Suffix" not in LLM(toy_model()).name


def test_weights_change_precision_and_presets_name_what_they_set(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    llm = paceline.load(tmp_path / "model", dtype="float32", drafter="suffix", token="secret")
    assert "secret" not in repr(vars(llm)), "the hub's token is not shown"
    before, engine = llm.generate("abab", max_new_tokens=8, temperature=0), llm.engine
    llm.quantize("int8")
    assert (llm.model.quantize, llm.drafter) == ("int8", "suffix")
    assert llm.engine is not engine
    assert llm.generate("abab", max_new_tokens=8, temperature=0).token_ids
    llm.quantize("none")
    assert llm.generate("abab", max_new_tokens=8, temperature=0).token_ids == before.token_ids, (
        "nothing was rounded twice"
    )
    with pytest.raises(InvalidOption, match="int3"):
        llm.quantize("int3")  # type: ignore[arg-type]
    assert llm.model.quantize is None
    assert paceline.load(tmp_path / "model", preset="low-memory").model.quantize == "int4"
    assert paceline.load(tmp_path / "model", preset="fast", quantize="int8").model.quantize == "int8", "given counts"
    with pytest.raises(InvalidOption, match="preset 'slow' is unknown"):
        paceline.load(tmp_path / "model", preset="slow")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="not available for model objects"):
        toy_llm().quantize("int8")


def test_a_text_that_begins_like_an_earlier_one_is_read_from_there(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    cached = {}
    for memory in (1.0, 0):
        llm = paceline.load(tmp_path / "model", dtype="float32", prefix_memory=memory)
        llm.engine.__dict__["chunk_invariant"] = True  # on machines too where sums depend on the size of a pass
        first = llm.generate([5, 6, 7, 8], max_new_tokens=6, temperature=0, ignore_eos=True)
        second = llm.generate([5, 6, 7, 8, *first.token_ids, 9, 10], max_new_tokens=6, temperature=0)
        assert first.stats.cached == 0
        cached[memory] = second.stats.cached
    assert cached[0] == 0
    assert cached[1.0] >= 7


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefix_memory": -1}, "prefix_memory must be a number of GiB, got -1"),
        ({"prefix_memory": "1G"}, "prefix_memory must be a number of GiB, got '1G'"),
        ({"prefix_memory": 0, "prefix_dir": "x"}, "prefix_dir needs memory and disk space"),
        ({"prefix_disk": 0, "prefix_dir": "x"}, "prefix_dir needs memory and disk space"),
        ({"prefix_disk": math.inf}, "prefix_disk must be a number of GiB, got inf"),
        ({"tensor_parallel": True, "prefix_dir": "x"}, "prefix_dir does not support tensor parallelism"),
    ],
)
def test_limits_of_cached_prefixes_are_checked_before_a_model_is_read(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        paceline.load("/no/model", **wrong)


def test_keys_and_values_in_8_bits_take_less_memory_and_any_drafter_writes_one_text(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    how = Sampling(max_new_tokens=30, temperature=0.8, seed=3)
    wide, plain, drafted = (
        paceline.load(tmp_path / "model", kv_type=stored, drafter=drafter)  # type: ignore[arg-type]
        for stored, drafter in (("auto", None), ("int8", None), ("int8", "suffix"))
    )
    targets = wide.model.target, plain.model.target
    assert all(isinstance(target, Decoder) for target in targets)
    wide_bytes, own = (target.cache_bytes(100) for target in targets)  # type: ignore[attr-defined]
    assert own == wide_bytes // 2 + 100 * 2 * 2 * 2 * 4
    assert plain.guarantee == wide.guarantee
    assert drafted.generate("abab" * 8, how).token_ids == plain.generate("abab" * 8, how).token_ids
    plain.quantize("int8")
    assert plain.model.target.kv_dtype == torch.int8  # type: ignore[attr-defined]


def test_keys_and_values_on_a_gpu_keep_the_models_dtype() -> None:
    assert _stored_type("int8", torch.bfloat16, True, [torch.device("cpu")]) == torch.int8
    gpu = [torch.device("cpu"), torch.device("cuda:1")]
    assert _stored_type("auto", torch.bfloat16, True, gpu) == torch.bfloat16
    with pytest.raises(InvalidOption, match=r"on cuda:1, keys and values have the model's dtype. Leave"):
        _stored_type("int8", torch.bfloat16, True, gpu)
