"""`generate(custom_generate=speculate())` returns the same tokens, ends and shapes as `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafters.model import DraftModel
from paceline.errors import InvalidOption
from paceline.integrations.transformers import Speculator, speculate
from paceline.testing import Oracle, tiny_target
from paceline.types import DraftBudget
from tests.support.adapted_models import BASE, CHAINS, TREES, model_of
from tests.support.cover import cover, some
from tests.support.lazy import transformers
from tests.support.toys import ALPHABET, toy_tokenizer

IDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


@cache
def made(name: str) -> Any:
    """Return a tiny transformers model."""
    if name == "llama":
        return model_of("Llama", BASE | IDS)
    if name == "gpt2":
        return model_of(TREES["GPT-2"][0], TREES["GPT-2"][1] | IDS)
    # In float64, transformers' own Bloom computes NaN for padding.
    return model_of(CHAINS["Bloom"][0], CHAINS["Bloom"][1] | IDS, dtype=torch.float32)


def llama() -> Any:
    return made("llama")


ONE = {"input_ids": torch.tensor([[1, 5, 9, 5, 9, 5, 2, 1, 5, 9]])}
_PADDED = [[0, 0, 0, 0, 0, 0, 0, 3, 4, 11], [1, 5, 9, 5, 9, 5, 2, 1, 5, 9], [0, 0, 0, 7, 7, 8, 7, 7, 8, 7]]
BATCH = {
    "input_ids": torch.tensor(_PADDED),
    "attention_mask": torch.tensor([[int(i >= pads) for i in range(10)] for pads in (7, 0, 3)]),
}


def drafting_itself(model: Any, shape: DraftBudget = DraftBudget.chain(5), **how: Any) -> Speculator:  # noqa: B008
    """Return the model as its own drafter. Every draft is right, so ends and bans occur inside accepted drafts."""
    from paceline.models.transformers import CausalLM

    return speculate(DraftModel(CausalLM(model), 37), draft=shape, **how)


def generate(model: Any, inputs: dict[str, Any], **how: Any) -> Any:
    return model.generate(**inputs, **({"max_new_tokens": 24, "do_sample": False} | how))


def agree(model: Any, inputs: dict[str, Any], how: Speculator, **kwargs: Any) -> Tensor:
    ours, theirs = generate(model, inputs, custom_generate=how, **kwargs), generate(model, inputs, **kwargs)
    assert torch.equal(ours, theirs)
    return theirs  # type: ignore[no-any-return]


class ByPrefix:
    """Bans a token that depends on the whole prefix, including padding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, ids in zip(scores, input_ids, strict=True):
            row[torch.tensor([int(ids.sum()) % 37, int(ids[-1]), (len(ids) * 5) % 37])] = -torch.inf
        return scores


PROCESSING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "n-grams and bad words": {"no_repeat_ngram_size": 2, "bad_words_ids": [[9], [5, 8]], "suppress_tokens": [3]},
    "penalty of the prompt": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "lengths": {"min_new_tokens": 15, "eos_token_id": [1, 5, 9, 12], "exponential_decay_length_penalty": (15, 1.1)},
    "one's own": {"logits_processor": [ByPrefix()]},
    "allowed tokens by sequence": {"prefix_allowed_tokens_fn": lambda row, ids: [row, 9 + row, 20, int(ids[-1])]},
}


@cover(model=["llama", "gpt2", "bloom"], processing=[*PROCESSING], together=[("model",), ("processing",)])
def test_greedy_text_is_generates_own(model: str, processing: str) -> None:
    for inputs, how in (
        (ONE, speculate("suffix", draft=DraftBudget(8, 4, 2))),
        (BATCH, drafting_itself(made(model))),
    ):
        agree(made(model), inputs, how, **PROCESSING[processing])


def test_a_drafter_that_looks_down_other_branches_leaves_no_trace() -> None:
    """The drafter ranks with the same processors, and calls them with prefixes that do not become text."""
    how = speculate(DraftModel(tiny_target(seed=9), 37), draft=DraftBudget(12, 4, 3))
    agree(llama(), BATCH, how, logits_processor=transformers.LogitsProcessorList([ByPrefix()]))


@some("seed", [0, 1], fast=["1"])
@some("inputs", {"one": ONE, "batch": BATCH}, fast=["batch"])
def test_without_a_drafter_greedy_text_in_bfloat16_is_generates_own(inputs: dict[str, Any], seed: int) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    how, listeners = speculate(None), (Listener(), Listener())
    model = model_of("Llama", BASE | IDS | wide, seed, torch.bfloat16)
    agree(model, inputs, how, max_new_tokens=36, repetition_penalty=1.4)
    assert [(stats.rounds, stats.tokens) for stats in how.stats] == [(36, 36)] * len(how.stats)
    generate(model, inputs, custom_generate=speculate("none", streamer=listeners[0]))  # type: ignore[arg-type]
    generate(model, inputs, streamer=listeners[1])
    assert listeners[0].heard == listeners[1].heard
    ours, theirs = (
        generate(model, inputs, return_dict_in_generate=True, output_scores=True, **more)
        for more in ({"custom_generate": how}, {})
    )
    assert all(map(torch.equal, ours.scores, theirs.scores))


def test_drafts_are_still_accepted() -> None:
    how = drafting_itself(llama())
    agree(llama(), BATCH, how, repetition_penalty=1.4)
    assert all(stats.tokens_per_round > 4 for stats in how.stats)
    assert [stats.tokens for stats in how.stats] == [24] * 3


class StopsAt:
    """End each sequence at a different length."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= length for length in self._lengths])


@some("at", range(24), fast=["0", "7", "20"])
def test_every_end_is_found_inside_a_draft(at: int) -> None:
    text = generate(llama(), ONE, max_new_tokens=24)[0, 10:].tolist()
    how = drafting_itself(llama())
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer()._backend)
    letters = "".join([*ALPHABET, "|"][t] for t in text[at : at + 2] if t < 36)
    strings = transformers.StopStringCriteria(words, letters or "?")
    stop = lambda criterion: {"stopping_criteria": transformers.StoppingCriteriaList([criterion])}  # noqa: E731
    ends = [
        agree(llama(), ONE, how, max_new_tokens=24, eos_token_id=text[at]),
        agree(llama(), ONE, how, max_new_tokens=24, **stop(strings)),
        agree(llama(), ONE, how, max_new_tokens=24, **stop(StopsAt([11 + at]))),
        agree(llama(), ONE, how, max_new_tokens=at + 1),
    ]
    assert ends[2].shape == ends[3].shape == (1, 11 + at)
    assert all(sequence.shape[1] <= 12 + at for sequence in ends)


def test_time_runs_out_inside_a_draft() -> None:
    how = drafting_itself(llama())
    assert agree(llama(), ONE, how, max_time=1e-9).shape == (1, 11)


def test_sequences_of_a_batch_end_one_by_one() -> None:
    how = drafting_itself(llama())
    text = generate(llama(), BATCH)
    padded = agree(llama(), BATCH, how, eos_token_id=[int(text[0, 14]), int(text[1, 19])], pad_token_id=2)
    assert (padded[:, -1] == 2).any()
    criteria = transformers.StoppingCriteriaList([StopsAt([13, 30, 21])])
    # Without an end-of-sequence token, ended replies continue.
    running = agree(llama(), BATCH, how, stopping_criteria=criteria)
    assert torch.equal(running, text[:, :30])


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_scores_and_logits_are_returned_as_generate_does(inputs: dict[str, Any]) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    how = {**wanted, "repetition_penalty": 1.4, "max_new_tokens": 14}
    theirs = generate(llama(), inputs, **how)
    ours = generate(llama(), inputs, custom_generate=drafting_itself(llama()), **how)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, its in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert len(mine) == len(its) == 14
        torch.testing.assert_close(torch.stack(mine), torch.stack(its))
    bare = generate(llama(), inputs, custom_generate=speculate(), return_dict_in_generate=True)
    assert bare.scores is None


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("ends", [None, 9])
def test_a_streamer_hears_what_it_hears_from_generate(inputs: dict[str, Any], ends: int | None) -> None:
    theirs, ours = Listener(), Listener()
    generate(llama(), inputs, streamer=theirs, eos_token_id=ends)
    how = drafting_itself(llama(), streamer=ours)
    generate(llama(), inputs, custom_generate=how, eos_token_id=ends)
    assert ours.heard == theirs.heard
    assert ours.heard[-1] == "end"


WARM = {"do_sample": True, "temperature": 0.9, "top_k": 12, "top_p": 0.95, "max_new_tokens": 16}


def test_torchs_seed_repeats_a_sampled_text_whatever_drafts() -> None:
    texts = []
    for seed, how in (
        (1, speculate(None)),
        (1, drafting_itself(llama())),
        (1, speculate("suffix")),
        (2, speculate()),
    ):
        torch.manual_seed(seed)
        texts.append(generate(llama(), BATCH, custom_generate=how, num_return_sequences=2, **WARM))
    assert texts[0].shape == (6, 26)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[3])
    assert not torch.equal(texts[0][0], texts[0][1])


def test_sampled_tokens_follow_the_models_probabilities() -> None:
    torch.manual_seed(0)
    count, prompt = 400, torch.tensor([[5]])
    with torch.no_grad():
        likely = llama()(prompt).logits[0, -1].float() / 0.9
    expected = likely.masked_fill(likely < likely.topk(12).values[-1], -torch.inf).softmax(-1)
    warm = {"do_sample": True, "temperature": 0.9, "top_k": 12, "num_return_sequences": count, "max_new_tokens": 1}
    out = generate(llama(), {"input_ids": prompt}, custom_generate=speculate(), **warm)
    drawn = out[:, -1].bincount(minlength=37) / count
    assert float((drawn - expected).abs().max()) < 0.07
    assert bool((drawn[expected == 0] == 0).all())
    assert float(expected.max()) < 0.8


RIGHT_PADDED = {"input_ids": torch.tensor([[3, 4, 0], [1, 5, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1] * 3])}
CANNOT: list[tuple[dict[str, Any], Callable[[], dict[str, Any]], str]] = [
    (ONE, lambda: {"num_beams": 2}, "beam"),
    (ONE, lambda: {"prompt_lookup_num_tokens": 3}, "assisted"),
    (ONE, lambda: {"guidance_scale": 1.5}, "UnbatchedClassifierFree"),
    (ONE, lambda: {"output_attentions": True, "return_dict_in_generate": True}, "attentions"),
    (ONE, lambda: {"past_key_values": transformers.DynamicCache()}, "DynamicCache"),
    (ONE, lambda: {"past_key_values": llama()(torch.tensor([[1, 5]])).past_key_values}, "your own cache"),
    (ONE, lambda: {"cache_implementation": "static"}, "StaticCache"),
    (ONE, lambda: {"position_ids": torch.arange(10)[None] + 3}, "position_ids"),
    (RIGHT_PADDED, lambda: {}, "left"),
    (ONE, lambda: {"max_new_tokens": 400}, "context length of 256"),
]


@pytest.mark.parametrize(("inputs", "how", "said"), CANNOT, ids=[said for _, _, said in CANNOT])
def test_unsupported_arguments_are_refused(
    inputs: dict[str, Any], how: Callable[[], dict[str, Any]], said: str
) -> None:
    with pytest.raises(InvalidOption, match=said):
        generate(llama(), inputs, custom_generate=speculate(), **how())


def test_drafters_are_checked_before_anything_runs() -> None:
    with pytest.raises(InvalidOption, match="eagle9"):
        speculate("eagle9")
    with pytest.raises(InvalidOption, match="tokenizer"):
        speculate("model:somewhere")


def test_a_speculation_serves_one_model_after_another_and_survives_an_error() -> None:
    how = speculate("suffix:remember")
    agree(llama(), ONE, how)

    class Fails(ByPrefix):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 20:
                raise KeyError("mine")
            return scores

    with pytest.raises(KeyError, match="mine"):
        generate(llama(), BATCH, custom_generate=how, logits_processor=transformers.LogitsProcessorList([Fails()]))
    agree(llama(), BATCH, how)
    agree(made("bloom"), BATCH, how)
    agree(llama(), ONE, how)


def test_an_error_of_one_sequence_ends_all_at_once() -> None:
    longest = 0

    class FailsForOne(ByPrefix):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            nonlocal longest
            if torch.equal(input_ids[0, :10], BATCH["input_ids"][1]) and input_ids.shape[1] > 14:
                raise KeyError("mine")
            longest = max(longest, input_ids.shape[1])
            return scores

    processors = transformers.LogitsProcessorList([FailsForOne()])
    with pytest.raises(KeyError, match="mine"):
        generate(llama(), BATCH, custom_generate=speculate(), logits_processor=processors, max_new_tokens=100)
    assert longest < 50


def test_a_processor_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control: if draft rows were processed with a wrong prefix, the texts would differ."""
    from paceline.integrations.sequences import BatchSequence

    honest = BatchSequence.process
    monkeypatch.setattr(BatchSequence, "process", lambda self, prefix, row: honest(self, prefix.after(()), row))
    how = speculate(Oracle(generate(llama(), ONE)[0].tolist(), 1.0, 37), draft=4)  # "auto" may draft nothing when timed
    processors = transformers.LogitsProcessorList([ByPrefix()])
    ours = generate(llama(), ONE, custom_generate=how, logits_processor=processors, max_new_tokens=20)
    theirs = generate(llama(), ONE, logits_processor=processors, max_new_tokens=20)
    monkeypatch.undo()
    assert not torch.equal(ours, theirs)
    agree(llama(), ONE, how, logits_processor=processors, max_new_tokens=20)
