"""The page on the real server: both use the same API."""

from __future__ import annotations

import re

import pytest

import paceline
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.models import ModelSource
from paceline.server.worker import Worker
from paceline.testing import tiny_target
from paceline.types import DraftBudget
from tests.support.browser_tab import Open, expect
from tests.support.running import Serving, serving, serving_models
from tests.support.toys import toy_model

SHOWN = "all => all.map(token => token.textContent).join('')"


def test_chat_shows_the_text_of_the_library(plain: LLM, open_tab: Open) -> None:
    prompt = "hello hello hello"
    alone = plain.generate([{"role": "user", "content": prompt}], Sampling(max_new_tokens=24, temperature=0.8, seed=5))
    # A drafter that is always right and drafts in every round, so that a few tokens already show accepted drafts.
    twin = DraftModel(tiny_target(), tiny_target().vocab_size)
    llm = LLM(toy_model(layers=2), {"suffix": Suffix(), "twin": twin}, DraftBudget.chain(2))
    with serving(llm) as it, open_tab(f"{it.address}/") as tab:
        for name, value in {"max_tokens": "24", "temperature": "0.8", "seed": "5", "max_draft": "2"}.items():
            tab.page.fill(f"[name={name}]", value)
        tab.page.select_option("[name=drafter]", "twin")
        tab.page.check("[name=compare]")
        on, off = tab.send(prompt).all()
        for column in (on, off):
            assert column.locator(".token").evaluate_all(SHOWN) == alone.text
        told = f"Same text, token for token. {len(alone.token_ids)} tokens."
        expect(tab.page.locator(".verdict")).to_contain_text(told)
        on.locator(".draft").first.hover()
        expect(tab.page.locator("#tip")).to_contain_text("Drafter twin")
        expect(tab.page.locator("#tip")).to_contain_text(re.compile(r"[12] of [12] drafted accepted"))
        assert it.idle()


@pytest.mark.slow
def test_stop_frees_the_slot_and_the_next_turn_goes_on(served: Serving, open_tab: Open) -> None:
    with open_tab(f"{served.address}/") as tab:
        tab.page.fill("[name=max_tokens]", "24")
        tab.send("hello")
        tab.page.fill("#prompt", "again")
        tab.page.press("#prompt", "Enter")
        tab.page.press("#prompt", "Escape")
        expect(tab.page.locator("#send")).to_be_visible()
        assert served.idle()
        tab.send("once more", turns=3)
        expect(tab.page.locator(".turn [role=alert]")).to_have_count(0)


@pytest.mark.slow
def test_a_reply_goes_on_after_its_limit(served: Serving, open_tab: Open) -> None:
    with open_tab(f"{served.address}/") as tab:
        tab.page.fill("[name=max_tokens]", "8")
        begun = tab.send("hello").locator(".token").evaluate_all(SHOWN)
        expect(tab.page.locator(".cut")).to_contain_text("Cut off at the limit of 8 tokens.")
        tab.page.get_by_role("button", name="Continue").click()
        expect(tab.page.locator(".numbers")).not_to_contain_text("8 tokens")
        expect(tab.page.locator("#send")).to_be_visible()
        assert tab.page.locator(".text .token").evaluate_all(SHOWN).startswith(begun)
        expect(tab.page.locator(".turn [role=alert]")).to_have_count(0)


@pytest.mark.slow
def test_the_servers_own_words_are_shown(served: Serving, open_tab: Open) -> None:
    with open_tab(f"{served.address}/") as tab:
        tab.send("hello " * 2000)
        expect(tab.page.locator(".turn [role=alert]")).to_contain_text("Shorten it")


@pytest.mark.slow
def test_the_page_is_open_and_the_api_is_not(plain: LLM, open_tab: Open) -> None:
    with serving(plain, api_keys=("secret",)) as it, open_tab(f"{it.address}/") as tab:
        expect(tab.page.locator("#key")).to_be_focused()
        tab.page.keyboard.type("secret")
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#model")).to_have_value("toy")
        tab.page.fill("[name=max_tokens]", "4")
        assert len(tab.send("hello").locator(".token").all()) > 0


@pytest.mark.slow
def test_a_model_is_loaded_at_its_first_message(open_tab: Open) -> None:
    def worker() -> Worker:
        return Worker(LLM(toy_model(), {"suffix": Suffix(), "ngram": NGram()}))

    sources = (ModelSource(("one",), worker, stays=True), ModelSource(("two",), worker))
    with serving_models(sources) as it, open_tab(f"{it.address}/") as tab:
        tab.page.select_option("#model", "two")
        tab.page.fill("[name=max_tokens]", "4")
        tab.page.get_by_role("switch", name="Let the model think").uncheck()
        tab.page.get_by_label("System prompt").fill("Be brief.")
        assert tab.send("hello").locator(".token").count() > 0
        expect(tab.page.locator("#model option").nth(1)).to_have_text("two")
        expect(tab.page.locator("[name=drafter] option")).to_have_text(["auto", "suffix", "ngram", "off"])


@pytest.mark.slow
@pytest.mark.model
def test_side_by_side_with_the_demo_model(open_tab: Open) -> None:
    llm = paceline.load("demo", drafter="suffix")
    with serving(llm) as it, open_tab(f"{it.address}/") as tab:
        tab.page.check("[name=compare]")
        for name, value in {"temperature": "0.7", "seed": "3", "max_tokens": "48"}.items():
            tab.page.fill(f"[name={name}]", value)
        prompt = "Count: one, two, three, one, two, three, one, two"
        on, off = tab.send(prompt).all()
        sampling = Sampling(max_new_tokens=48, temperature=0.7, seed=3)
        alone = LLM(llm.model).generate([{"role": "user", "content": prompt}], sampling)
        assert on.evaluate("e => e.textContent") == off.evaluate("e => e.textContent") == alone.text
        expect(tab.page.locator(".verdict")).to_contain_text("Same text, token for token.")
