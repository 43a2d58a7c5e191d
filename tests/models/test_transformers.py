"""transformers models behind the adapter: the same logits in trees and chains, and all features on top of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoints.model_config import read_config
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.prefix_key import target_key
from paceline.engine.prefix_store import PrefixStore
from paceline.engine.self_check import guarantee
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption, UnsupportedModel
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run, tiny_target
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.adapted_models import ALL, BASE, CHAINS, FULL, HEADS, OLD, TREES, adapter, causal, model_of
from tests.support.cached_engine import CachedEngine
from tests.support.cover import some
from tests.support.lazy import transformers
from tests.support.toys import toy_tokenizer
from tests.support.trees import path_to

PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]


@torch.inference_mode()
def plain(target: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits [V] after a text, from one pass of the model without a cache."""
    return target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    # Several families take their softmax in float32, whatever the model's dtype.
    return float((ours - theirs).norm() / theirs.norm()) < 1e-6


def some_draft(nodes: int, trees: bool, seed: int) -> Draft:
    """Return a random tree with different siblings."""
    if not trees:
        return Draft.chain([(7 * i + seed) % 37 for i in range(nodes)])
    generator = random.Random(seed)
    parents = [generator.randint(max(0, i - 1), i) for i in range(nodes)]
    return Draft(tuple(range(1, nodes + 1)), tuple(parents))


@some(
    "name",
    [*ALL],
    fast=[
        *("GPT-2", "GPT-J", "GPT-NeoX", "Phi-3 with a window", "Qwen2-MoE", "Gemma 3", "gpt-oss"),
        *("Bloom", "MPT", "Falcon with ALiBi", "GPT-Neo, whose window counts columns"),
    ],
)
def test_each_row_has_the_logits_of_its_path_fed_plainly(name: str) -> None:
    """Two slots with different lengths share passes, texts exceed every window, and rows move at each commit."""
    target = adapter(name)
    assert target.trees == (name in TREES)
    cache = target.new_cache()
    texts = [[(5 * i + 3) % 37 for i in range(14)], [(11 * i + 1) % 37 for i in range(21)]]
    slots = [cache.acquire() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        rows = pack_prefix(text[:-1], slot, 0, target.device)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(text) - 1)])
    for seed in range(3):
        drafts = [some_draft(6, target.trees, seed), some_draft(3, target.trees, seed + 9)]
        lengths = [len(text) - 1 for text in texts]
        rows = pack([text[-1] for text in texts], drafts, slots, lengths, target.device)
        logits = target.forward(rows, cache, Want()).logits
        for i, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            for row in range(len(draft.tokens) + 1):
                path = [draft.tokens[r - 1] for r in path_to(draft, row)[-2::-1]]
                assert same(logits[i, row], plain(target, text + path))
            kept = path_to(draft, len(draft.tokens))[-2::-1]
            cache.commit(rows, [kept if j == i else None for j in range(2)])
            text += [*(draft.tokens[r - 1] for r in kept), 5]
    assert list(cache.lengths) == [len(text) - 1 for text in texts]


@pytest.mark.parametrize("name", ["GPT-2", "Bloom", "Gemma 3"])
def test_slots_are_cut_forked_and_taken_again(name: str) -> None:
    target = adapter(name)
    cache = target.new_cache()
    text = [(5 * i + 3) % 37 for i in range(20)]

    def after(slot: int, token: int) -> torch.Tensor:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], target.device)
        return target.forward(rows, cache, Want()).logits[0, 0]

    first = cache.acquire()
    rows = pack_prefix(text, first, 0, target.device)
    target.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, 20)])
    cache.truncate(first, 12)
    twin = cache.fork(first)
    rows = pack([4], [Draft()], [first], [12], target.device)
    assert same(target.forward(rows, cache, Want()).logits[0, 0], plain(target, [*text[:12], 4]))
    cache.commit(rows, [()])
    assert same(after(twin, 9), plain(target, [*text[:12], 9]))
    assert same(after(first, 2), plain(target, [*text[:12], 4, 2]))
    cache.release(first)
    cache.release(first)
    again = cache.acquire()
    assert again == first
    assert cache.lengths[again] == 0
    assert same(after(again, 6), plain(target, [6]))


def test_a_slot_that_held_nan_harms_no_later_request() -> None:
    target = adapter("GPT-2")
    cache = target.new_cache()
    slots = [cache.acquire(), cache.acquire()]
    broken = target.model.transformer.wte.register_forward_hook(lambda module, args, out: out * torch.nan)
    target.forward(pack_prefix(PROMPT, slots[1], 0, target.device), cache, Want("none"))
    broken.remove()
    cache.release(slots[1])
    assert cache.acquire() == slots[1]
    rows = pack_prefix(PROMPT, slots[0], 0, target.device)
    target.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, len(PROMPT))])
    rows = pack([3, 4], [Draft()] * 2, slots, list(cache.lengths), target.device)
    assert same(target.forward(rows, cache, Want()).logits[1, 0], plain(target, [4]))


def test_hidden_states_are_tapped_where_layers_begin() -> None:
    target = adapter("GPT-NeoX")
    tokens = list(range(9))
    theirs = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    cache = target.new_cache()
    rows = pack_prefix(tokens, cache.acquire(), 0, target.device)
    taps = target.forward(rows, cache, Want("last", taps=(0, 1, "final"))).taps
    for tap, state in zip((0, 1, "final"), theirs, strict=True):
        torch.testing.assert_close(taps[tap], state)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *(("GPT-2", 0.9), ("Bloom", 0.0), ("StarCoder2 with a window", 0.9)),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("GPT-2", 0.0), ("Bloom", 0.9), ("StarCoder2 with a window", 0.0))
        ),
        *(pytest.param("Qwen2-MoE", temperature, marks=pytest.mark.slow) for temperature in (0.0, 0.9)),
    ],
)
def test_the_text_is_the_targets_own(name: str, temperature: float) -> None:
    target = adapter(name)
    sampling = Sampling(max_new_tokens=24, temperature=temperature, seed=3)
    alone, finish, _ = run(target, PROMPT, sampling)
    oracle = Oracle(PROMPT + alone, 0.7, 37)
    drafts: list[tuple[Drafter, DraftBudget]] = [
        (NGram(), DraftBudget.chain(5)),
        (Suffix(), DraftBudget(9, 4, 3)),
        (DraftModel(tiny_target(seed=9), 37), DraftBudget(9, 4, 3)),
        (oracle, DraftBudget.chain(5)),
        (oracle, DraftBudget(9, 4, 3)),
        (Oracle(PROMPT + alone, 0.0, 37), DraftBudget(9, 4, 3)),
    ]
    for drafter, shape in drafts:
        assert run(target, PROMPT, sampling, drafter, shape)[:2] == (alone, finish)


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 3", "MPT"])
def test_an_adapter_that_drafts_for_itself_is_always_right(name: str) -> None:
    target = adapter(name)
    for length in (1, 4):
        for prompt in (PROMPT, PROMPT[:1]):
            sampling = Sampling(max_new_tokens=30, temperature=0.8, seed=2)
            stats = run(target, prompt, sampling, DraftModel(target, 37), DraftBudget.chain(length))[2]
            assert stats.tokens_per_round == 1 + length
    if target.trees:
        assert run(target, PROMPT, sampling, DraftModel(target, 37), DraftBudget(12, 4, 3))[2].tokens_per_round > 3


def test_a_draft_model_that_takes_no_trees_drafts_chains() -> None:
    target, sampling, drafted = adapter("GPT-2"), Sampling(max_new_tokens=9), list[Draft]()

    class Noted(DraftModel):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            drafted.extend(drafts := super().propose(asks))
            return drafts

    tokens = run(target, PROMPT, sampling, Noted(adapter("Bloom"), 37), DraftBudget(9, 3, 3))[0]
    assert tokens == run(target, PROMPT, sampling)[0]
    assert any(len(draft.tokens) == 3 for draft in drafted)
    assert all(draft == Draft.chain(draft.tokens) for draft in drafted)


@pytest.mark.parametrize("name", ["GPT-2", "Bloom"])
def test_a_ragged_batch_writes_the_same_as_single_requests(name: str) -> None:
    target = adapter(name)
    sampling = Sampling(max_new_tokens=24)
    prompts = [PROMPT, [3], [7, 7, 7, 7, 8], list(range(30))]
    alone = [run(target, prompt, sampling)[0] for prompt in prompts]
    engine = Engine(target, Suffix(), DraftBudget(6, 3, 2))
    requests = []
    for count, prompt in enumerate(prompts):
        text = TextStream(Sampling(max_new_tokens=24 - 5 * count), (), lambda ids: "", 200)
        requests.append(engine.start(prompt, sampling.sampler(), text, Stats(0, "rounding")))
        engine.prefill(requests[-1])
    while live := [r for r in requests if not r.finish]:
        engine.step(live)
    for count, (request, prompt, text) in enumerate(zip(requests, prompts, alone, strict=True)):
        assert request.token_ids[len(prompt) :] == text[: 24 - 5 * count]


def test_native_and_adapted_llama_write_the_same() -> None:
    model = model_of("Llama", BASE)
    native = Decoder(read_config(model.config.to_dict()), model.state_dict(), torch.float64, torch.device("cpu"))
    for sampling in (Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, temperature=0.8, top_p=0.9, seed=1)):
        assert (
            run(native, PROMPT, sampling)[0] == run(causal(model), PROMPT, sampling, Suffix(), DraftBudget(8, 4, 2))[0]
        )


def test_drafts_reach_the_end_of_the_context() -> None:
    for name, ends in (("GPT-2", 256), ("MPT", 252)):
        target = adapter(name)
        assert target.context_length == ends
        prompt = [i % 37 for i in range(240)]
        assert len(run(target, prompt, Sampling(max_new_tokens=99), Suffix())[0]) == ends - 240


def test_rotary_factors_that_change_end_the_context() -> None:
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = BASE | {"rope_parameters": factors, "original_max_position_embeddings": 64}
    assert causal(model_of("Phi3", sizes)).context_length == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_any_dtype_verify(dtype: torch.dtype) -> None:
    for name, trees in (
        ("GPT-2", True),
        ("GPT-J", True),
        ("Gemma 2, every other layer a window", True),
        ("Bloom", False),
    ):
        target = causal(model_of(*ALL[name], dtype=dtype))
        assert target.trees is trees
        cache = target.new_cache()
        rows = pack_prefix(PROMPT, cache.acquire(), 0, target.device)
        assert target.forward(rows, cache, Want()).logits.dtype == torch.float32


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mamba": ("Mamba", {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2}, "MambaForCausalLM.*recurrent"),
    "Jamba": ("Jamba", BASE | {"num_experts": 2}, "JambaForCausalLM.*recurrent"),
    "RecurrentGemma": ("RecurrentGemma", BASE | {"num_hidden_layers": 3}, "recurrent"),
    "Qwen3-Next": ("Qwen3Next", HEADS | {"num_experts": 2}, "Qwen3NextForCausalLM.*recurrent"),
    "MiniMax": ("MiniMax", BASE, "LinearAttentionLayer"),
    "BERT without a causal mask": ("Bert", FULL, "both directions"),
    "XLNet": ("XLNet", {"vocab_size": 37, "d_model": 32, "n_layer": 2, "n_head": 4}, "XLNetLMHeadModel cannot verify"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_past_cannot_be_cut_are_refused_by_name(name: str) -> None:
    kind, sizes, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=said):
        causal(model_of(kind, sizes, dtype=torch.float32))


def test_other_kinds_of_models_are_refused_by_name() -> None:
    t5 = {"vocab_size": 37, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**t5))
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder"):
        paceline.load(model, tokenizer=toy_tokenizer())
    model = model_of("Llama", BASE)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="sdpa"):
        causal(model)


@cache
def ignoring() -> tuple[Any, Any]:
    """Classes of models that attend to all previous rows, and to none of earlier passes."""

    class IgnoresMasks(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids, attention_mask=None, position_ids=None, **rest):  # type: ignore[no-untyped-def]
            return super().forward(input_ids, attention_mask=None, position_ids=position_ids, **rest)

    class IgnoresItsPast(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids, past_key_values=None, position_ids=None, **rest):  # type: ignore[no-untyped-def]
            rest.pop("attention_mask", None)
            return super().forward(input_ids, position_ids=position_ids, **rest)

    return IgnoresMasks, IgnoresItsPast


def test_the_check_at_the_start_notices_what_a_model_does_not_do() -> None:
    weights = model_of("Llama", BASE)
    masks, past = ignoring()
    model = masks(weights.config).double()
    model.load_state_dict(weights.state_dict())
    assert causal(weights).trees
    assert not causal(model).trees
    with pytest.raises(UnsupportedModel, match="IgnoresItsPast cannot verify"):
        causal(past(weights.config).double())


def test_a_model_is_checked_in_few_passes_over_its_first_layers() -> None:
    model = model_of("Llama", BASE | {"num_hidden_layers": 6}, dtype=torch.float32)
    calls: list[tuple[int, int]] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, number=number: calls.append((number, args[0].shape[1])))
    llm = paceline.load(model, tokenizer=toy_tokenizer())
    assert {number for number, _ in calls} == {0, 1}
    assert len(calls) == 2 * 4
    calls.clear()
    assert llm.guarantee == guarantee(causal(model))
    assert {number for number, _ in calls} == {0, 1}
    assert len(model.model.layers) == model.config.num_hidden_layers == 6
    calls.clear()
    llm.generate("what", Sampling(max_new_tokens=3))
    assert {number for number, _ in calls} == set(range(6))


def test_first_layers_hold_one_of_each_kind() -> None:
    from paceline.models.transformers_excerpt import first_layers

    windows = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    model = model_of("Gemma3Text", HEADS | {"sliding_window": 3, "num_hidden_layers": 6, "layer_types": windows})
    assert len(first_layers(model).model.layers) == 5
    llama = model_of("Llama", BASE | {"num_hidden_layers": 6})
    short = first_layers(llama)
    assert short.config.num_hidden_layers == len(short.model.layers) == 2
    assert short.lm_head is llama.lm_head
    llama.model.layers[3].mlp.forward = llama.model.layers[3].mlp.forward  # patched
    assert len(first_layers(llama).model.layers) == 5
    llama.model.layers[4].self_attn.is_causal = False
    assert len(first_layers(llama).model.layers) == 6


@pytest.mark.parametrize("change", ["a tuple", "a hook", "a type of the config"])
def test_layers_differ_by(change: str) -> None:
    from paceline.models.transformers_excerpt import first_layers

    llama = model_of("Llama", BASE | {"num_hidden_layers": 6})
    for number, layer in enumerate(llama.model.layers):
        if change == "a tuple":
            layer.self_attn.window = (4, None if number < 3 else 8)
        elif change == "a hook" and number == 3:
            layer.mlp.register_forward_hook(lambda *_: None)
    if change == "a type of the config":
        llama.config.layer_types = ["full_attention"] * 3 + ["other"] * 3
    assert len(first_layers(llama).model.layers) == 5


def test_a_late_layer_that_no_pass_can_repeat_is_noticed() -> None:
    class Sums(type(model_of("Llama", BASE).model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states, **rest):  # type: ignore[no-untyped-def]
            states = super().forward(hidden_states, **rest)
            return states.cumsum(1) if self.self_attn.layer_idx == 3 else states

    hooked, own = (model_of("Llama", BASE | {"num_hidden_layers": 4}) for _ in range(2))
    hooked.model.layers[3].register_forward_hook(lambda layer, args, states: states.cumsum(1))
    for layer in own.model.layers:
        layer.__class__ = Sums
    for model in (hooked, own):
        with pytest.raises(UnsupportedModel, match="cannot verify"):
            causal(model)


def test_a_model_whose_first_layers_do_not_run_is_checked_whole() -> None:
    class Counts(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):  # type: ignore[no-untyped-def]
            if len(self.model.layers) < 4:
                raise RuntimeError("layers are missing")
            return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **rest)

    target = causal(Counts(model_of("Llama", BASE | {"num_hidden_layers": 4}).config).double())
    assert target.trees
    assert target.excerpt() is target
    assert guarantee(target) in ("bits", "rounding")


# Loading.


def test_a_model_object_is_loaded_with_its_tokenizer() -> None:
    model = model_of("GPT2", OLD | {"bos_token_id": 0, "eos_token_id": 36}).train()
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9, top_k=None)
    words = toy_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words._backend, eos_token="</s>")
    fast.chat_template = words.chat_template
    fast.backend_tokenizer.enable_truncation(3)
    llm = paceline.load(model, tokenizer=fast, drafter="suffix", draft=4)
    assert not model.training
    assert llm.model.eos == (36,)
    assert llm.sampling() == Sampling(temperature=0.7, top_p=0.9)
    assert llm.tokenizer.special_tokens == {"eos_token": "</s>"}
    out = llm.generate([{"role": "user", "content": "what is it?"}], Sampling(max_new_tokens=20))
    assert out.prompt_tokens == len("<user:what is it?><a:")
    assert out.token_ids == run(causal(model), words.encode("<user:what is it?><a:"), Sampling(max_new_tokens=20))[0]
    assert paceline.load(model, tokenizer=words).generate("hi", Sampling(max_new_tokens=4)).text


def test_a_model_of_chains_is_loaded_and_drafted_for() -> None:
    llm = paceline.load(model_of(*CHAINS["Bloom"]), tokenizer=toy_tokenizer(), draft=DraftBudget(9, 4, 3))
    alone = paceline.load(llm.model.target.model, tokenizer=toy_tokenizer(), drafter=None)  # type: ignore[attr-defined]
    how = Sampling(max_new_tokens=40)
    assert llm.generate("what is it?", how).token_ids == alone.generate("what is it?", how).token_ids


def test_objects_that_are_no_model_or_lack_a_tokenizer_are_refused() -> None:
    model = model_of("GPT2", OLD)
    with pytest.raises(InvalidOption, match=r"Linear.*PreTrainedModel"):
        paceline.load(torch.nn.Linear(2, 2), tokenizer=toy_tokenizer())  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="PreTrainedModel"):
        paceline.load(model.transformer, tokenizer=None)
    with pytest.raises(InvalidOption, match="AutoTokenizer"):
        paceline.load(model)
    with pytest.raises(InvalidOption, match="str is not a fast tokenizer"):
        paceline.load(model, tokenizer="gpt2")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="model object only"):
        paceline.load("demo", tokenizer=toy_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    model_of("GPT2", OLD | {"bos_token_id": 0, "eos_token_id": 36}, dtype=torch.float32).save_pretrained(path)
    toy_tokenizer()._backend.save(str(path / "tokenizer.json"))
    return path


def test_a_folder_of_an_unknown_family_goes_through_transformers(folder: Path) -> None:
    llm = paceline.load(folder, dtype="float32", device="cpu")
    assert type(llm.model.target).__name__ == "CausalLM"
    plain = paceline.load(folder, dtype="float32", device="cpu", drafter=None)
    how = Sampling(max_new_tokens=30)
    assert llm.generate("hello", how).token_ids == plain.generate("hello", how).token_ids
    assert llm.model.eos == (36,)


def test_models_through_transformers_are_not_quantised(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"not quantised here. Leave quantize out"):
        paceline.load(folder, quantize="int8", drafter=None)
    model = model_of("GPT2", OLD)
    with pytest.raises(InvalidOption, match="keeps its weights"):
        paceline.load(model, tokenizer=toy_tokenizer(), quantize="int4")


def test_keys_and_values_of_transformers_keep_their_dtype(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="runs through transformers, which keeps keys and values"):
        paceline.load(folder, kv_type="int8", drafter=None)
    with pytest.raises(InvalidOption, match="keeps keys and values in its own dtype"):
        paceline.load(model_of("GPT2", OLD), tokenizer=toy_tokenizer(), kv_type="int8")
    assert paceline.load(folder, kv_type="f32", dtype="float32", drafter=None).model.target.dtype == torch.float32


def test_info_says_so(folder: Path) -> None:
    from typer.testing import CliRunner

    from paceline.cli import app

    out = CliRunner().invoke(app, ["info", str(folder)])
    assert out.exit_code == 0
    assert "through transformers" in out.stdout
    assert "GPT2LMHeadModel" in out.stdout


def test_without_the_extra_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoints.loader.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"gpt2.*\[transformers\]"):
        paceline.load(folder)


def test_a_part_of_a_head_has_its_bias() -> None:
    target, tokens = adapter("GPT-J"), torch.tensor([3, 8, 36])
    x = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.shaped(x @ target.head()[tokens].T, tokens), target.logits(x)[:, tokens])


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2, every other layer a window", "Bloom", "GPT-J"])
def test_texts_that_begin_alike_begin_with_what_was_saved(name: str) -> None:
    target = adapter(name)
    engine = CachedEngine(target, Suffix(), None, PrefixCache(1 << 30, chunk_invariant=True))
    sampling, text = Sampling(max_new_tokens=12, temperature=0.9, seed=4, ignore_eos=True), list(PROMPT)
    for new in ([3, 4], [5], [6, 7, 8]):
        text += new
        ours = run(target, text, sampling, engine=engine)[0]
        assert ours == run(target, text, sampling)[0]
        text += ours
    assert min(engine.cached[1:]) > 15
    # An empty cache gets its sizes from the first saved slot that it loads.
    cache, saved = target.new_cache(), engine.prefixes.find([*text, 1])
    assert saved is not None
    slot = cache.acquire()
    assert cache.load(slot, saved.target, 20) == 20
    rows = pack([text[20]], [Draft()], [slot], [20], target.device)
    assert same(target.forward(rows, cache, Want()).logits[0, 0], plain(target, text[:21]))


@pytest.mark.slow
def test_a_prefix_outlives_the_process_on_disk(tmp_path: Path) -> None:
    sampling, text, cached = Sampling(max_new_tokens=12, temperature=0.9, seed=4, ignore_eos=True), PROMPT * 4, []
    for _ in range(2):
        target = causal(model_of(*ALL["GPT-J"]))
        engine = CachedEngine(target, None, None, PrefixCache(0))
        engine.prefixes = PrefixCache(1 << 30, True, PrefixStore(tmp_path, 1 << 30, target_key(target), None, {}))
        assert run(target, text, sampling, engine=engine)[0] == run(target, text, sampling)[0]
        engine.save_prefixes(60)
        cached += engine.cached
    assert cached == [0, len(text) - 2]
