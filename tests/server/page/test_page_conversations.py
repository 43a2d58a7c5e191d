"""Conversations on the page: stored in the browser, edited, regenerated, with any of the server's models."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.cli.chat import read_conversation
from tests.support.browser_tab import Open, Tab, expect
from tests.support.fake_server import MODEL, SKY, Fake, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

TEXT = "".join(text for _, texts in SKY for text in texts)


KEPT_ROUNDS = """async () => {
  const { list, get } = await import('./store.js');
  return (await get((await list())[0].id)).turns[0].replies[0]?.rounds.length;
}"""


def said(fake: Fake) -> list[tuple[str, str]]:
    """Return the roles and texts of the last request."""
    return [(message["role"], message["content"]) for message in fake.bodies[-1]["messages"]]


def titles(page: Page) -> list[str]:
    return page.locator("#list .open").all_inner_texts()


def test_conversations_are_kept_and_opened_again(tab: Tab, fake: Fake) -> None:
    page = tab.page
    page.get_by_label("System prompt").fill("Be brief.")
    tab.send("One")
    tab.send("Two", turns=2)
    page.click("#new")
    page.get_by_label("System prompt").fill("")
    tab.send("Another " + "x" * 80)
    expect(page.locator("#list .open")).to_have_count(2)
    assert titles(page) == ["Another " + "x" * 51 + "…", "One"]
    page.reload()
    expect(page.locator(".bubble")).to_contain_text("Another")  # the conversation that was open
    page.get_by_role("button", name="One", exact=True).click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#list [aria-current]")).to_have_text("One")
    assert [text.evaluate("e => e.textContent") for text in page.locator(".text").all()] == [TEXT, TEXT]
    page.locator(".text .token").nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("Round 1: 2 of 4 drafted accepted, 31 ms")
    expect(page.locator(".numbers").first).to_contain_text(f"{len(SKY)} rounds")
    tab.send("Three", turns=3)
    expected = [("system", "Be brief."), ("user", "One"), ("assistant", TEXT), ("user", "Two"), ("assistant", TEXT)]
    assert said(fake) == [*expected, ("user", "Three")]
    expect(page.locator("#list .open").first).to_have_text("One")  # the latest comes first


def test_a_reload_shows_the_conversation_that_was_open(tab: Tab) -> None:
    page = tab.page
    tab.send("One")
    page.click("#new")
    page.reload()
    expect(page.locator("#list .open")).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(0)  # a new chat stays one
    page.locator("#list .open").click()
    expect(page.locator(".turn")).to_have_count(1)
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#list [aria-current]")).to_have_text("One")
    other = page.context.new_page()
    other.goto(tab.url)
    expect(other.locator("#list .open")).to_have_count(1)
    expect(other.locator(".turn")).to_have_count(0)  # a new tab begins with a new chat
    other.locator("#list .open").click()
    other.get_by_role("button", name="Delete conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator("#intro")).to_be_visible()


def test_tabs_know_of_one_anothers_conversations(tab: Tab, open_tab: Open) -> None:
    first = tab.page
    second = Tab(first.context.new_page(), tab.url)
    second.page.goto(tab.url)
    expect(second.page.locator("#model")).to_have_value(MODEL)
    second.send("Two")
    expect(first.locator("#list .open")).to_have_text("Two")
    first.locator("#list .open").click()
    expect(first.locator(".turn")).to_have_count(1)
    second.send("More", turns=2)
    expect(first.locator(".turn")).to_have_count(2)
    expect(first.locator(".turn").last.locator(".numbers")).to_contain_text(f"{len(SKY)} rounds")
    # A title that is being edited does not change.
    first.get_by_role("button", name="Rename conversation").click()
    first.keyboard.type("Ren")
    second.page.click("#new")
    second.send("Third")
    expect(second.page.locator("#list .open")).to_have_count(2)
    first.keyboard.type("amed")
    first.keyboard.press("Enter")
    expect(first.locator("#list .open")).to_have_text(["Third", "Renamed"])
    expect(second.page.locator("#list .open")).to_have_text(["Third", "Renamed"])


def test_conversations_are_searched(tab: Tab, fake: Fake) -> None:
    page = tab.page
    search = page.get_by_role("searchbox", name="Search conversations")
    expect(search).to_be_hidden()
    fake.text = "About **Cats**."
    tab.send("Animals")
    page.click("#new")
    fake.text = "About dogs."
    tab.send("One")
    page.get_by_role("button", name="Edit message").click()
    page.get_by_role("textbox", name="Edit message").fill("Two")
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_visible()
    for words, found in {
        "cats": ["Animals"],
        "ANIMAL": ["Animals"],
        "about": ["One", "Animals"],
        "one": ["One"],
    }.items():
        search.fill(words)
        expect(page.locator("#list .open")).to_have_text(found)
    search.fill("horses")
    expect(page.locator("#list .open")).to_have_count(0)
    expect(page.locator("#chats-none")).to_have_text("No conversation contains these words.")
    search.press("Escape")
    expect(page.locator("#list .open")).to_have_count(2)
    expect(page.locator("#chats")).to_be_visible()
    search.fill("cats")
    page.get_by_role("button", name="Animals").click()
    expect(page.locator(".bubble")).to_have_text("Animals")
    expect(page.locator("#list .open")).to_have_text(["Animals"])


FIRST_STORE = """async () => new Promise((resolve) => {
  indexedDB.deleteDatabase('paceline').onsuccess = () => {
    const request = indexedDB.open('paceline', 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('titles', { keyPath: 'id' }).put({ id: '1', title: 'Old', updated: 1 });
      const turns = [{ prompt: 'Old', attempt: 0, replies: [{ title: 'Reply', about: '', content: 'Cats.',
        reasoning: '', rounds: [], finish: 'stop', seconds: 1 }] }];
      const body = { id: '1', title: 'Old', updated: 1, model: 'm', system: '', turns };
      request.result.createObjectStore('bodies', { keyPath: 'id' }).put(body);
    };
    request.onsuccess = () => { request.result.close(); resolve(); };
  };
})"""


def test_conversations_from_older_pages_are_searched(tab: Tab) -> None:
    tab.page.evaluate(FIRST_STORE)
    tab.page.reload()
    tab.page.get_by_role("button", name="Old").click()
    expect(tab.page.locator(".bubble")).to_have_text("Old")
    tab.page.fill("#search", "cats")
    expect(tab.page.locator("#list .open")).to_have_text("Old")
    tab.page.fill("#search", "dogs")
    expect(tab.page.locator("#list .open")).to_have_count(0)


def test_conversations_are_renamed_deleted_and_brought_back(tab: Tab) -> None:
    page = tab.page
    tab.send("One")
    page.get_by_role("button", name="Rename conversation").click()
    assert page.evaluate("() => document.activeElement.value") == "One"
    page.keyboard.type("<b>Sky</b>")
    page.keyboard.press("Enter")
    expect(page.locator("#list .open")).to_have_text("<b>Sky</b>")
    page.get_by_role("button", name="Rename conversation").click()
    page.keyboard.type("Not kept")
    page.keyboard.press("Escape")
    expect(page.locator("#list .open")).to_have_text("<b>Sky</b>")
    page.get_by_role("button", name="Delete conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#list .open")).to_have_count(0)
    expect(page.locator("#chats-notice")).to_contain_text("Deleted “<b>Sky</b>”.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn")).to_have_count(1)
    assert titles(page) == ["<b>Sky</b>"]
    page.get_by_role("button", name="Delete conversation").click()
    expect(page.locator("#list .open")).to_have_count(0)
    page.reload()
    expect(page.locator("#chats-none")).to_be_visible()


def test_exported_conversation_is_read_by_the_command_line(tab: Tab, tmp_path: Path) -> None:
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.send("Why is the sky blue?")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Export conversation").click()
    assert download.value.suggested_filename == "Why-is-the-sky-blue-.json"
    download.value.save_as(tmp_path / "chat.json")
    assert [tuple(one.values()) for one in read_conversation(tmp_path / "chat.json")] == [
        ("system", "Be brief."),
        ("user", "Why is the sky blue?"),
        ("assistant", TEXT),
    ]
    assert json.loads((tmp_path / "chat.json").read_text())["model"] == MODEL


def test_conversation_deleted_during_its_reply_stays_deleted(tab: Tab, fake: Fake) -> None:
    fake.hold_at = 2
    tab.page.fill("#prompt", "Why?")
    tab.page.press("#prompt", "Enter")
    expect(tab.page.locator(".text .token")).to_have_count(9)
    tab.page.get_by_role("button", name="Delete conversation").click()
    assert fake.gone.wait(30)
    expect(tab.page.locator("#list .open")).to_have_count(0)
    tab.page.reload()
    expect(tab.page.locator("#chats-none")).to_be_visible()


def test_another_conversation_opened_during_a_reply_keeps_what_there_is(tab: Tab, fake: Fake) -> None:
    tab.send("One")
    tab.page.click("#new")
    fake.hold_at = 2
    tab.page.fill("#prompt", "Two")
    tab.page.press("#prompt", "Enter")
    expect(tab.page.locator(".text .token")).to_have_count(9)
    tab.page.get_by_role("button", name="One", exact=True).click()
    expect(tab.page.locator(".bubble")).to_have_text("One")
    fake.hold_at = None
    tab.page.get_by_role("button", name="Two", exact=True).click()
    expect(tab.page.locator(".bubble")).to_have_text("Two")
    expect(tab.page.locator(".text .token")).to_have_count(9)
    expect(tab.page.get_by_text("Stopped.")).to_be_visible()


def test_a_page_closed_during_a_reply_keeps_what_there_is(tab: Tab, fake: Fake) -> None:
    fake.hold_at = 2
    tab.page.fill("#prompt", "Why?")
    tab.page.press("#prompt", "Enter")
    expect(tab.page.locator(".text .token")).to_have_count(9)
    for _ in range(100):
        if tab.page.evaluate(KEPT_ROUNDS) == 2:
            break
        tab.page.wait_for_timeout(100)
    tab.page.reload()
    expect(tab.page.locator(".text .token")).to_have_count(9)


def test_conversations_work_without_browser_storage(open_tab: Open, address: str, fake: Fake) -> None:
    """If storage is disabled, a conversation lasts as long as the page."""
    with open_tab(address) as tab:
        tab.page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('off') } })")
        tab.page.reload()
        tab.send("One")
        tab.page.click("#new")
        tab.page.get_by_role("button", name="One", exact=True).click()
        expect(tab.page.locator(".turn")).to_have_count(1)


def test_a_full_store_is_told(tab: Tab) -> None:
    tab.page.evaluate("() => { IDBObjectStore.prototype.put = () => { throw new Error('full') } }")
    tab.send("One")
    expect(tab.status).to_contain_text("This browser could not store the conversation: full")


def test_a_regenerated_reply_has_the_next_seed(tab: Tab, fake: Fake) -> None:
    tab.page.fill("[name=seed]", "5")
    tab.send("One")
    tab.send("Two", turns=2)
    again = tab.page.get_by_role("button", name="Regenerate")
    expect(again).to_have_count(1)  # only of the last reply
    fake.text = "Another."
    for seed in (6, 7):
        again.click()
        expect(tab.page.locator("#send")).to_be_visible()
        assert fake.bodies[-1]["seed"] == seed
        assert said(fake) == [("user", "One"), ("assistant", TEXT), ("user", "Two")]
    expect(tab.page.locator(".turn")).to_have_count(2)
    tab.send("Three", turns=3)
    assert fake.bodies[-1]["seed"] == 5
    assert said(fake)[3] == ("assistant", "Another.")


def test_message_edited_is_answered_anew(tab: Tab, fake: Fake) -> None:
    page = tab.page
    tab.send("One")
    tab.send("Two", turns=2)
    edit = page.get_by_role("button", name="Edit message").first
    edit.click()
    field = page.get_by_role("textbox", name="Edit message")
    expect(field).to_be_focused()
    field.fill("Dropped")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble").first).to_have_text("One")
    expect(edit).to_be_focused()
    edit.click()
    field.fill("First\nand")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#send")).to_be_visible()
    assert said(fake) == [("user", "First\nand\nsecond")]
    expect(page.locator(".text")).to_have_count(1)


def test_models_by_name_and_how_long_one_loads(open_tab: Open, fake: Fake) -> None:
    fake.others, fake.load_until = ("qwen3:0.6b", "llama3.2:1b"), threading.Event()
    with serving(fake.app()) as url, open_tab(url) as tab:
        model = tab.page.get_by_role("combobox", name="Model")
        expect(model).to_have_value(MODEL)
        assert model.locator("option").all_inner_texts() == [
            MODEL,
            "qwen3:0.6b (not loaded)",
            "llama3.2:1b (not loaded)",
        ]
        model.select_option("qwen3:0.6b")
        expect(tab.page.locator("#promise")).to_contain_text("loaded when you send the first message")
        assert tab.page.locator("[name=drafter] option").all_inner_texts() == ["auto", "off"]
        tab.page.fill("#prompt", "Why?")
        tab.page.press("#prompt", "Enter")
        expect(tab.page.locator(".reply [role=status]")).to_contain_text("Loading qwen3:0.6b …")
        expect(tab.page.locator(".reply [role=status]")).to_contain_text(re.compile(r"… \d+ s"))
        fake.load_until.set()
        expect(tab.page.locator("#send")).to_be_visible()
        assert fake.bodies[-1]["model"] == "qwen3:0.6b"
        expect(tab.page.locator(".reply [role=status]")).to_have_count(0)
        expect(model.locator("option").nth(1)).to_have_text("qwen3:0.6b")
        assert "eagle3" in tab.page.locator("[name=drafter] option").all_inner_texts()
        tab.page.reload()
        expect(model).to_have_value("qwen3:0.6b")  # the choice is kept


def test_reasoning_is_folded(formatted: Tab, fake: Fake) -> None:
    fake.reasoning, fake.text = "I think <b>hard</b>.", "Thus."
    text = formatted.send()
    expect(text).to_have_text("Thus.")
    thoughts = formatted.page.locator(".thoughts")
    expect(thoughts).to_be_hidden()
    formatted.page.get_by_text("Thoughts", exact=True).click()
    expect(thoughts).to_have_text("I think <b>hard</b>.")
    formatted.page.get_by_role("switch", name="Let the model think").uncheck()
    formatted.send("Again", turns=2)
    assert fake.bodies[-1]["reasoning"] == "off"
    assert said(fake)[1] == ("assistant", "Thus.")


@pytest.mark.parametrize("marks", [True, False])
def test_a_server_lost_in_mid_stream_leaves_the_text_so_far(
    open_tab: Open, address: str, fake: Fake, marks: bool
) -> None:
    fake.cut_after = 2
    with open_tab(address, marks=marks) as tab:
        text = tab.send()
        expect(tab.page.locator(".turn [role=alert]")).to_contain_text("before the reply was complete.")
        assert text.inner_text() == "The sky looks blue because sunlight is scattered by"
        fake.cut_after = None
        tab.page.get_by_role("button", name="Try again").click()
        expect(tab.page.locator(".turn [role=alert]")).to_have_count(0)
        expect(tab.page.locator("#send")).to_be_visible()
        expect(text).to_contain_text("red and orange.")


def test_panels_on_a_phone(open_tab: Open, address: str) -> None:
    with open_tab(address, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as tab:
        page = tab.page
        expect(page.locator("#chats")).to_be_hidden()
        tab.send("A long question, " * 20)
        page.tap("#chats-button")
        for button in page.locator("#chats button").all():
            box = button.bounding_box()
            assert box
            assert box["x"] + box["width"] <= 360
        assert tab.no_sideways_scroll()
        page.tap("#list .open")
        expect(page.locator("#chats")).to_be_hidden()
        page.tap("#chats-button")
        page.touchscreen.tap(350, 300)
        expect(page.locator("#chats")).to_be_hidden()
