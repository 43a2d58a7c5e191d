"""Versions of a turn: an edit or a new reply keeps the old version, and users can return to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.browser_tab import Tab, expect
from tests.support.fake_server import Fake

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.slow


def edit(tab: Tab, turn: int, text: str) -> None:
    tab.page.locator(".turn").nth(turn).get_by_role("button", name="Edit message").click()
    tab.page.get_by_role("textbox", name="Edit message").fill(text)
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator(".turn")).to_have_count(turn + 1)
    expect(tab.page.locator("#send")).to_be_visible()


def versions(tab: Tab, turn: int) -> Locator:
    return tab.page.locator(".turn").nth(turn).locator(".versions")


def texts(tab: Tab) -> list[str]:
    return tab.page.locator(".bubble").all_inner_texts()


def test_an_edit_keeps_the_turns_that_were_there(tab: Tab, fake: Fake) -> None:
    tab.send("One")
    expect(versions(tab, 0)).to_be_hidden()
    tab.send("Two", turns=2)
    tab.send("Three", turns=3)
    edit(tab, 1, "Zwei")
    assert texts(tab) == ["One", "Zwei"]
    expect(versions(tab, 1)).to_contain_text("2 / 2")
    edit(tab, 0, "Eins")
    assert texts(tab) == ["Eins"]
    tab.page.reload()
    expect(versions(tab, 0)).to_contain_text("2 / 2")
    versions(tab, 0).get_by_role("button", name="Previous version").click()
    expect(tab.page.locator(".turn")).to_have_count(2)
    assert texts(tab) == ["One", "Zwei"]
    assert tab.focused("[aria-label='Next version']")
    versions(tab, 1).get_by_role("button", name="Previous version").click()
    expect(tab.page.locator(".turn")).to_have_count(3)
    assert texts(tab) == ["One", "Two", "Three"]
    expect(versions(tab, 1).get_by_role("button", name="Previous version")).to_be_disabled()
    tab.page.reload()  # the choice is kept
    expect(tab.page.locator(".turn")).to_have_count(3)
    tab.send("Four", turns=4)
    asked = [message["content"] for message in fake.bodies[-1]["messages"] if message["role"] == "user"]
    assert asked == ["One", "Two", "Three", "Four"]
    versions(tab, 1).get_by_role("button", name="Next version").click()
    expect(tab.page.locator(".turn")).to_have_count(2)
    versions(tab, 1).get_by_role("button", name="Previous version").click()
    expect(tab.page.locator(".turn")).to_have_count(4)


def test_a_new_reply_keeps_the_old_one(tab: Tab, fake: Fake) -> None:
    fake.text = "First."
    text = tab.send("One")
    for reply in ("Second.", "Third."):
        fake.text = reply
        tab.page.get_by_role("button", name="Regenerate").click()
        expect(tab.page.locator("#send")).to_be_visible()
        expect(text).to_have_text(reply)
    for reply in ("Second.", "First."):
        tab.page.get_by_role("button", name="Previous version").click()
        expect(text).to_have_text(reply)
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(versions(tab, 0)).to_contain_text("4 / 4")
    expect(tab.page.locator("#send")).to_be_visible()
    assert [body["seed"] for body in fake.bodies] == [0, 1, 2, 3]  # no seed twice
    tab.send("Two", turns=2)
    assert fake.bodies[-1]["messages"][1]["content"] == "Third."


def test_a_reply_without_text_is_no_version(tab: Tab, fake: Fake) -> None:
    fake.fail = (400, "No.")
    tab.send("One")
    fake.fail = None
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".text .token").first).to_be_visible()
    expect(versions(tab, 0)).to_be_hidden()
