"""Gemma 4's assistant compared with transformers' assistant, for a tiny Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from paceline.cache.slab import SlabCache
from paceline.checkpoints.head_files import holds_head, open_head
from paceline.checkpoints.head_fit import fit_to_target
from paceline.checkpoints.loader import Loaded
from paceline.cli import app
from paceline.drafters.assistant import Assistant
from paceline.drafters.base import Ask
from paceline.drafters.factory import make_drafter
from paceline.drafters.stack import DrafterStack
from paceline.errors import HeadMismatch, UnsupportedModel
from paceline.models.assistant import AssistantNetwork
from paceline.models.heads import AssistantConfig, HeadFile, kind_of
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack_prefix
from tests.support.cover import cover
from tests.support.golden import decoder
from tests.support.golden import reference as transformers_model
from tests.support.lazy import transformers
from tests.support.logits import assert_close, feed, text
from tests.support.tiny_families import CASES

SIZES = {key: value for key, value in CASES["gemma4, large"].items() if key != "model_type"}


@cache
def tiny(case: str) -> Any:
    """Return transformers' assistant with two layers for a target."""
    torch.manual_seed(1)
    target = transformers_model(case).config
    wide = target.per_layer_config[2]
    config = {
        **SIZES,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "final_logit_softcapping": None},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": wide.num_key_value_heads},
    }
    own = transformers.Gemma4TextConfig(**config)
    whole = transformers.Gemma4AssistantConfig(text_config=own, backbone_hidden_size=SIZES["hidden_size"])
    # transformers 5.23 refuses models in which all layers share keys, even its own assistants.
    with patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", ["reuse", "reuse"]):
        made = transformers.Gemma4AssistantForCausalLM(whole)
    for tensor in made.state_dict().values():
        if tensor.dim() == 1:
            torch.nn.init.normal_(tensor, 1.0, 0.3)
    return made.double().eval()


def saved(case: str, folder: Path) -> HeadFile:
    tiny(case).save_pretrained(folder)
    assert holds_head(folder)
    head = open_head(folder)
    assert kind_of(head.config) == "assistant"
    return head


def drafter(case: str, folder: Path, dtype: torch.dtype = torch.float64) -> Assistant:
    head = saved(case, folder)
    assert isinstance(head.config, AssistantConfig)
    return Assistant(head.config, head.tensors, decoder(case, dtype))


@torch.inference_mode()
def reference(case: str, tokens: list[int], steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """Return the logits of a greedy chain after `tokens`. The target has read all of them but the last."""
    target, assistant = transformers_model(case), tiny(case)
    out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    window = SIZES["sliding_window"]
    # A row at the position after the text sees one position less of the text than the window size.
    shared = {
        kind: tuple(x[:, :, 1 - window :] if kind == "sliding_attention" else x for x in pair)
        for kind, pair in out.shared_kv_states.items()
    }
    hidden, token, found, chain = out.hidden_states[-1][:, -1:], tokens[-1], [], []
    for _ in range(steps):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        one = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=shared,
            use_cache=False,
        )
        token, hidden = int(one.logits[0, -1].argmax()), one.last_hidden_state
        found.append(one.logits[0, -1])
        chain.append(token)
    return found, chain


@pytest.mark.parametrize("case", ["gemma4, small", "gemma4, all at once"])
@pytest.mark.parametrize("length", [9, 17, 45])
def test_a_chain_equals_the_chain_of_transformers(case: str, length: int, tmp_path: Path) -> None:
    head, target = saved(case, tmp_path), decoder(case)
    assert isinstance(head.config, AssistantConfig)
    net = AssistantNetwork(head.config, head.tensors, target)
    tokens = text(length)
    truth, chain = reference(case, tokens, 3)
    store = target.new_cache()
    assert isinstance(store, SlabCache)
    slots = [store.acquire(), store.acquire()]
    feed(target, store, slots[0], text(30))  # a neighbour, which has another length
    taps = feed_taps(target, store, slots[1], tokens[:-1])
    hidden = torch.stack([feed_taps(target, store, slots[0], [5]), taps])[:, None]
    for expected, before in zip(truth, [tokens[-1], *chain], strict=False):
        states, hidden = net.step(torch.tensor([[before], [before]]), hidden, store, slots)
        assert_close(net.logits(states)[1, 0], expected)


def feed_taps(target: Any, store: Any, slot: int, tokens: list[int]) -> torch.Tensor:
    """Commit a chunk, and return the normed state after it."""
    rows = pack_prefix(tokens, slot, store.lengths[slot], target.device)
    out = target.forward(rows, store, Want(taps=("final",)))
    store.commit(rows, [range(1, len(tokens))])
    last: torch.Tensor = out.taps["final"][0, len(tokens) - 1]
    return last


@cover(
    case=["gemma4, small", "gemma4, large"],
    shape=[DraftBudget.chain(4), DraftBudget(9, 3, 3)],
    temperature=[0.0, 0.8],
    together=[("case",), ("shape",), ("temperature",)],
)
def test_the_text_is_that_without_it(case: str, shape: DraftBudget, temperature: float, tmp_path: Path) -> None:
    how, prompt, ours = Sampling(max_new_tokens=40, temperature=temperature, seed=3), text(20), decoder(case)
    drafted = run(ours, prompt, how, drafter(case, tmp_path), shape)
    assert drafted[0] == run(ours, prompt, how)[0]
    assert drafted[2].drafted


def test_drafts_are_the_same_over_the_padded_heads_of_the_cpu_kernels(tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        ours, drafting = decoder("gemma4, small", dtype), drafter("gemma4, small", tmp_path, dtype)
        reply, _, stats = run(ours, text(20), Sampling(max_new_tokens=40), drafting, DraftBudget.chain(3))
        found.append((reply, stats.drafted, stats.accepted_at))
    assert found[0] == found[1]


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    head = saved("gemma4, large", tmp_path)
    assert isinstance(head.config, AssistantConfig)
    with pytest.raises(UnsupportedModel, match="keys and values"):
        Assistant(head.config, head.tensors, decoder("qwen3"))


def test_a_config_without_layers_is_refused(tmp_path: Path) -> None:
    saved("gemma4, large", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["enable_moe_block"] = True
    raw["text_config"] |= {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="experts"):
        open_head(tmp_path)


class Checked(Assistant):
    """Compares each draft with the reference's chain, but proposes up to a given number of correct tokens instead."""

    case, checked = "", 0
    whole: tuple[int, ...] = ()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            assert list(draft.tokens) == reference(self.case, list(ask.token_ids), len(draft.tokens))[1]
            self.checked += len(draft.tokens)
        right = self.checked % 4
        following = [(*self.whole[ask.position + 1 :][:right], 7) for ask in asks]
        return [Draft.chain(tokens[: ask.budget.nodes]) for ask, tokens in zip(asks, following, strict=True)]


def check_rounds(case: str, folder: Path) -> int:
    """Compare all drafts of a reply in which rounds accept no, some and all tokens. Return the reply's tokens."""
    target, prompt, how = decoder(case), text(11), Sampling(max_new_tokens=24)
    reply = run(target, prompt, how)[0]
    drafting = Checked(saved(case, folder).config, tiny(case).state_dict(), target)  # type: ignore[arg-type]
    drafting.case, drafting.whole = case, (*prompt, *reply)
    assert run(target, prompt, how, drafting, DraftBudget.chain(3))[0] == reply
    return drafting.checked


def test_drafts_see_the_text_and_the_state_that_the_target_committed(tmp_path: Path) -> None:
    assert check_rounds("gemma4, small", tmp_path) > 15


@pytest.mark.parametrize("off", ["state", "position"])
def test_an_error_of_one_position_would_be_seen(off: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "state":
        receive = Assistant._receive
        monkeypatch.setattr(
            Assistant, "_receive", lambda self, slot, taps, row: receive(self, slot, taps, max(row - 1, -2))
        )
    else:
        view = SlabCache.view

        def late(self: SlabCache, slots: Sequence[int], rows: int, layers: Any) -> Any:
            held = list(self.lengths)
            try:
                for slot in slots:
                    self.lengths[slot] -= 1
                return view(self, slots, rows, layers)
            finally:
                self.lengths[:] = held

        monkeypatch.setattr(SlabCache, "view", late)
    with pytest.raises(AssertionError):
        check_rounds("gemma4, small", tmp_path)


def test_info_says_what_an_assistant_is(tmp_path: Path) -> None:
    saved("gemma4, large", tmp_path)
    shown = CliRunner().invoke(app, ["info", str(tmp_path)]).stdout
    assert "Gemma 4 assistant" in shown
    assert "2, over the target's keys and values" in shown


@pytest.mark.parametrize("name", ["assistant", "head"])
def test_it_is_named_by_its_folder(name: str, tmp_path: Path) -> None:
    saved("gemma4, small", tmp_path)
    target: Any = Loaded(decoder("gemma4, small"), None, (), {}, tmp_path)  # type: ignore[arg-type]
    made = make_drafter(f"suffix+{name}:{tmp_path}", target, lambda reference: target)
    assert isinstance(made, DrafterStack)
    with pytest.raises(HeadMismatch, match="vocabulary of 101"):
        fit_to_target(open_head(tmp_path), replace(decoder("gemma4, small").config, vocab_size=102))
