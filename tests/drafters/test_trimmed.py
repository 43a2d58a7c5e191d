"""Trimmed output heads: they compute the full head's logits for the kept tokens, and keep the right tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.drafters import trimmed
from paceline.drafters.eagle import Eagle
from paceline.drafters.model import DraftModel
from paceline.drafters.trimmed import check_draft_vocab, head_tokens
from paceline.errors import InvalidData, InvalidOption
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run, tiny_target
from paceline.types import DraftBudget, Want
from paceline.verify.tree import pack_prefix
from tests.support.cover import cover
from tests.support.tiny_heads import eagle_config, eagle_tensors
from tests.support.toys import toy_foreigner, toy_model, toy_target

CPU = torch.device("cpu")
KEPT = torch.tensor([0, 2, 3, 5, 9, 17, 20, 36])
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]


def logits_of(model: Decoder) -> torch.Tensor:
    cache = model.new_cache()
    return model.forward(pack_prefix(PROMPT, cache.acquire(), 0, CPU), cache, Want()).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_a_trimmed_head_gives_the_full_heads_logits(tied: bool, mode: str | None) -> None:
    config = replace(TINY, tied=tied)
    tensors = Quantised(random_tensors(config), mode, requantise=True) if mode else random_tensors(config)  # type: ignore[arg-type]
    full, cut = (Decoder(config, tensors, torch.float32, CPU, head_tokens=kept) for kept in (None, KEPT))
    whole = logits_of(full)
    assert logits_of(cut).shape == (*whole.shape[:-1], len(KEPT))
    assert torch.allclose(logits_of(cut), whole[..., KEPT], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits_of(cut), whole[..., KEPT + 1 - 37 * (KEPT == 36)], rtol=1e-2, atol=1e-2)


@cover(
    draft={"chain": DraftBudget.chain(5), "tree": DraftBudget(12, 4, 3)},
    sampling={"greedy": Sampling(), "warm": Sampling(temperature=1.0, top_p=0.9, seed=3)},
    together=[("draft",), ("sampling",)],
)
def test_kept_tokens_are_drafted_as_by_the_full_model(draft: DraftBudget, sampling: Sampling) -> None:
    """A head trimmed to a text's tokens drafts as well as the full head. A head without them never drafts the text."""
    target, sampling = toy_target(), replace(sampling, max_new_tokens=40)
    plain, _, _ = run(target, PROMPT, sampling)
    written = torch.tensor(sorted({*plain}))
    others = torch.tensor(sorted({*range(37)} - {*plain}))
    accepted = []
    for kept in (None, written, others):
        model = Decoder(TINY, random_tensors(TINY), torch.float64, CPU, head_tokens=kept)
        text, _, stats = run(target, PROMPT, sampling, DraftModel(model, 37, kept), draft)
        assert text == plain
        accepted.append(stats.accepted)
    assert accepted[1] == pytest.approx(accepted[0], rel=0.15)
    assert accepted[2] == 0


@pytest.mark.parametrize("changes", [{"version": 1}, {"draft_vocab": 37}], ids=["the target's head", "its own"])
def test_an_eagle_head_over_all_tokens_can_be_cut(changes: dict[str, int]) -> None:
    target, config = tiny_target(), eagle_config(**changes)
    tensors, states = eagle_tensors(config), torch.randn(3, TINY.hidden, dtype=torch.float64)
    whole, cut = Eagle(config, tensors, target), Eagle(replace(config, head_tokens=KEPT), tensors, target)
    assert whole._net.subset is None
    assert cut._net.subset is not None
    assert torch.equal(cut._net.subset.ids, KEPT)
    torch.testing.assert_close(cut._net.logits(states), whole._net.logits(states)[:, KEPT])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{"logits_divisor": 16.0}, {"final_softcap": 0.5}, {}], ids=["factor", "bound", "-"])
def test_a_borrowed_head_has_the_targets_bias_factor_and_bound(shape: dict[str, float], dtype: torch.dtype) -> None:
    theirs = replace(TINY, **shape)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    bias, states = (torch.randn(n, generator=draw, dtype=torch.float64) for n in ((37,), (2, 3, TINY.hidden)))
    target = Decoder(theirs, {**random_tensors(theirs), "lm_head.bias": bias}, dtype, CPU)
    config, x = eagle_config(version=1, head_tokens=KEPT), states.to(dtype)
    truth = target.logits(x)[..., KEPT]
    error = (Eagle(config, eagle_tensors(config), target)._net.logits(x) - truth).norm() / truth.norm()
    assert error < (1e-9 if dtype == torch.float64 else 0.25), "a head that was cut has 4 bits"


def test_a_head_with_tokens_of_its_own_keeps_them() -> None:
    config = eagle_config()
    tensors, target = eagle_tensors(config), tiny_target()
    nets = [Eagle(c, tensors, target)._net for c in (config, replace(config, head_tokens=KEPT))]
    assert nets[0].subset is not None
    assert nets[1].subset is not None
    assert torch.equal(nets[0].subset.ids, nets[1].subset.ids)


def test_the_draft_vocabulary_keeps_the_lowest_ids_and_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_model()
    keep = lambda wanted, size=37: head_tokens(wanted, target, target.tokenizer, size)  # noqa: E731
    assert keep("auto") is keep(0) is keep(37) is keep(99) is None
    ends = {*target.eos}
    kept = keep(8)
    assert kept is not None
    assert len(kept) == 8
    assert ends <= {*kept.tolist()}
    assert [*kept] == sorted(kept)
    assert {*kept.tolist()} - ends == {*[i for i in range(37) if i not in ends][: 8 - len(ends)]}
    monkeypatch.setattr(trimmed, "_TRIM_ABOVE", 36)
    monkeypatch.setattr(trimmed, "_KEPT_LOWEST_IDS", 10)
    large = keep("auto")
    assert large is not None
    assert len(large) == 10
    assert head_tokens("auto", target, toy_foreigner().tokenizer, 37) is None, (
        "another tokenizer's ids mean other tokens"
    )


def test_own_answers_say_which_tokens_are_frequent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_model()
    monkeypatch.setattr(trimmed, "_KEPT_FREQUENT", 4 + len(target.eos))
    rows = [{"answer": "zzzz"}, {"answer": "yyy"}, {"answer": "ignored", "token_ids": [30, 30, 30, 31, 31, 99]}]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    kept = head_tokens(path, target, target.tokenizer, 37)
    wanted = {*target.tokenizer.encode("zy", special=False), 30, 31, *target.eos}
    assert kept is not None
    assert {*kept.tolist()} == wanted
    assert kept.equal(torch.tensor(sorted(wanted)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no answers"),
        (b'{"answer": "a"}\n{"answer": 3}\n', "line 2.*text"),
        (b"[1]\n", "line 1.*object"),
        (b'{"token_ids": [1, -1]}\n', "line 1.*whole"),
        (b'{"token_ids": "abc"}\n', "line 1.*whole"),
        (b"\xff\xfe\n", "line 1.*UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1.*JSON"),
    ],
)
def test_files_without_answers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    target = toy_model()
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InvalidData, match=message):
        head_tokens(tmp_path / "a.jsonl", target, target.tokenizer, 37)


def test_only_the_beginning_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmed, "_MAX_ANSWER_BYTES", 40)
    monkeypatch.setattr(trimmed, "_KEPT_FREQUENT", 2)
    target = toy_model()
    line = b'{"answer": "zz"}\n'
    (tmp_path / "a.jsonl").write_bytes(line * 2 + b"not JSON at all\n" * 100)
    assert head_tokens(tmp_path / "a.jsonl", target, target.tokenizer, 37) is not None


@pytest.mark.parametrize("wrong", [-1, True, "many", "/no/such/file"])
def test_impossible_choices_are_refused_before_anything_is_loaded(wrong: object) -> None:
    with pytest.raises(InvalidOption, match="draft_vocab"):
        check_draft_vocab(wrong)  # type: ignore[arg-type]
    check_draft_vocab("auto")
    check_draft_vocab(0)
