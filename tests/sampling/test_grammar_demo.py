"""A schema with the demo model: the reply is valid, the same with every drafter, and keys take no additional rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.loader import Loaded
from paceline.drafters.factory import open_drafter
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Sampler
from paceline.types import DraftBudget
from tests.conftest import packaged_model

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.model, pytest.mark.slow]

FIELDS = {
    "product_display_name": {"type": "string", "maxLength": 24},
    "is_available_in_warehouse": {"type": "boolean"},
    "estimated_delivery_time_in_days": {"type": "integer", "minimum": 1, "maximum": 30},
    "shipping_category": {"enum": ["standard", "express", "oversized freight"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
PROMPT = "Describe one product of a bicycle shop as JSON."


@pytest.fixture(scope="module")
def demo() -> Iterator[Loaded]:
    with packaged_model("demo") as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_schema_is_kept_with_every_drafter_and_its_keys_are_free(
    demo: Loaded, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = Sampling(max_new_tokens=120, temperature=temperature, seed=3, grammar=Grammar.json_schema(SCHEMA))
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "forced", lambda self, prefix, limit: [])
        llm = LLM(demo)
        if llm.guarantee != "bits":
            pytest.skip("rows depend on their neighbours here, so equality holds up to rounding only")
        plain = llm.generate(PROMPT, how)
    said = json.loads(plain.text)
    assert list(said) == list(FIELDS)
    assert len(said["product_display_name"]) <= 24
    assert 1 <= said["estimated_delivery_time_in_days"] <= 30
    assert said["shipping_category"] in FIELDS["shipping_category"]["enum"]  # type: ignore[operator]
    free = llm.generate(PROMPT, how)
    assert free.token_ids == plain.token_ids
    assert free.stats.rounds < plain.stats.rounds / 2
    assert free.stats.accepted == free.stats.drafted
    for spec, draft in (("suffix", DraftBudget(9, 4, 2)), ("eagle3", DraftBudget(8, 4, 2))):
        drafter = open_drafter(spec, demo, None, lambda reference: demo, open_head)
        out = LLM(demo, drafter, draft).generate(PROMPT, how)
        assert out.token_ids == plain.token_ids
        assert out.finish_reason == "eos"
