"""Text files attached to a message, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.chat import read_conversation
from paceline.vision.picture import read_picture
from tests.support.browser_tab import Open, Tab, expect
from tests.support.fake_server import SKY, Fake
from tests.support.pictures import data_url, encoded, noise

pytestmark = pytest.mark.slow

TEXT = "".join(text for _, texts in SKY for text in texts)
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def file(name: str, data: str | bytes, kind: str = "text/plain") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data.encode() if isinstance(data, str) else data}


def test_text_files_go_with_a_message(tab: Tab, fake: Fake, tmp_path: Path) -> None:
    page = tab.page
    page.set_input_files(
        "#picker", [file("a.py", "print('<b>')\n"), file("notes.md", "A\n```\nB\n```\n"), file("c", "")]
    )
    expect(page.locator("#files li")).to_have_count(3)
    page.get_by_role("button", name="Remove c").click()
    assert tab.focused("#prompt")
    tab.send("Explain.")
    expect(page.locator("#files li")).to_have_count(0)
    sent = "a.py:\n```\nprint('<b>')\n```\n\nnotes.md:\n````\nA\n```\nB\n```\n````\n\nExplain."
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": sent}]
    expect(page.locator(".bubble")).to_have_text("Explain.")
    shown = page.locator(".file").first
    expect(shown.locator("pre")).to_be_hidden()
    shown.locator("summary").click()
    expect(shown.locator("pre")).to_have_text("print('<b>')\n")
    page.reload()
    expect(page.locator(".file summary")).to_have_text(["a.py", "notes.md"])
    tab.send("And?", turns=2)
    assert fake.bodies[1]["messages"][0]["content"] == sent
    with page.expect_download() as download:
        page.get_by_role("button", name="Export conversation").click()
    download.value.save_as(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][0]["content"] == sent


def test_a_file_may_hold_many_backticks(tab: Tab, fake: Fake) -> None:
    text = "`a" * 300_000
    tab.page.set_input_files("#picker", file("a.txt", text))
    tab.send("")
    assert fake.bodies[0]["messages"][0]["content"] == f"a.txt:\n```\n{text}\n```"


def test_a_file_needs_no_message(tab: Tab, fake: Fake) -> None:
    tab.page.set_input_files("#picker", file("a.txt", "Why is the sky blue?"))
    tab.send("")
    assert fake.bodies[0]["messages"][0]["content"] == "a.txt:\n```\nWhy is the sky blue?\n```"
    expect(tab.page.locator("#list .open")).to_have_text("a.txt")
    expect(tab.page.locator(".bubble")).to_be_hidden()


def test_a_message_edited_keeps_its_files(tab: Tab, fake: Fake) -> None:
    tab.page.set_input_files("#picker", file("a.txt", "A"))
    tab.send("One")
    tab.page.get_by_role("button", name="Edit message").click()
    tab.page.get_by_role("textbox", name="Edit message").fill("Two")
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#send")).to_be_visible()
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "a.txt:\n```\nA\n```\n\nTwo"}]
    expect(tab.page.locator(".file summary")).to_have_text("a.txt")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (file("cat.png", PNG, "image/png"), "cat.png is an image, and the models of this server read text only."),
        (file("a.zip", b"PK\x03\x04\0", "application/zip"), "a.zip is not a text file"),
        (file("latin.txt", "é".encode("latin-1")), "latin.txt is not a text file in UTF-8."),
        (file("big.txt", "x" * 1_000_001), "big.txt is larger than 1 MB."),
    ],
    ids=["image", "binary", "latin", "large"],
)
def test_other_files_are_refused(tab: Tab, fake: Fake, given: dict[str, Any], told: str) -> None:
    tab.page.set_input_files("#picker", [given, file("a.txt", "A")])
    expect(tab.page.locator("#files-note")).to_contain_text(told)
    expect(tab.page.locator("#files li")).to_have_count(1)  # the other one is taken
    tab.send("One")
    expect(tab.page.locator("#files-note")).to_be_empty()
    assert fake.bodies[0]["messages"][0]["content"] == "a.txt:\n```\nA\n```\n\nOne"


GIVE = """([kind, name, type]) => {
  const data = new DataTransfer();
  data.items.add(new File(['A'], name, { type }));
  const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  return document.querySelector('#prompt').dispatchEvent(event);
}"""


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_files_are_pasted_and_dropped(tab: Tab, way: str) -> None:
    assert tab.page.evaluate(GIVE, [way, "a.txt", "text/plain"]) is False  # the browser does not open it
    expect(tab.page.locator("#files li")).to_have_text("a.txt")
    tab.page.evaluate(GIVE, [way, "cat.png", "image/png"])
    expect(tab.page.locator("#files-note")).to_contain_text("cat.png is an image")


def test_images_go_with_a_message(open_tab: Open, fake: Fake, address: str, tmp_path: Path) -> None:
    fake.sees = True
    data = encoded(noise(size=(60, 40)))
    with open_tab(address) as tab:
        page = tab.page
        page.set_input_files("#picker", [file("cat.png", data, "image/png"), file("bad.png", PNG, "image/png")])
        expect(page.locator("#files-note")).to_contain_text("bad.png is not an image that this browser can show")
        expect(page.locator("#files img")).to_have_count(1)
        page.set_input_files("#picker", file("a.txt", "A"))
        page.set_input_files("#picker", file("wide.bmp", encoded(noise(size=(4000, 400)), "BMP"), "image/bmp"))
        expect(page.locator("#files img")).to_have_count(2)
        tab.send("What?")
        cat, wide, text = fake.bodies[-1]["messages"][0]["content"]
        assert cat == {"type": "image_url", "image_url": {"url": data_url(data)}}
        assert text == {"type": "text", "text": "a.txt:\n```\nA\n```\n\nWhat?"}
        assert read_picture(wide["image_url"]["url"]).pixels.shape == (205, 2048, 3), "scaled down by the page"
        page.reload()
        expect(page.get_by_role("img", name="cat.png")).to_be_visible()
        tab.send("And?", turns=2)
        assert fake.bodies[-1]["messages"][0]["content"][0] == cat
        with page.expect_download() as download:
            page.get_by_role("button", name="Export conversation").click()
        download.value.save_as(tmp_path / "chat.json")
        first, *_ = read_conversation(tmp_path / "chat.json")
        assert first["content"][0]["image"].digest == read_picture(data).digest


def test_files_on_a_phone(open_tab: Open, address: str) -> None:
    with open_tab(address, viewport={"width": 380, "height": 740}, has_touch=True, is_mobile=True) as tab:
        tab.page.set_input_files("#picker", [file("a" * 120 + ".txt", "x" * 2000), file("b.txt", "B")])
        expect(tab.page.locator("#files li")).to_have_count(2)
        assert tab.no_sideways_scroll()
        tab.send("One")
        tab.page.locator(".file summary").first.click()
        assert tab.no_sideways_scroll()
