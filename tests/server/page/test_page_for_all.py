"""The page for everyone: keyboard, screen reader, phone, both themes, reduced motion, content security policy."""

from __future__ import annotations

import re

import pytest

from tests.support.browser_tab import Open, Tab, expect
from tests.support.fake_server import SKY, Fake

pytestmark = pytest.mark.slow

TEXT = "".join(text for _, texts in SKY for text in texts)
TOKENS = sum(len(texts) for _, texts in SKY)


def test_everything_works_by_keyboard(tab: Tab, fake: Fake) -> None:
    press, tip = tab.page.keyboard.press, tab.page.locator("#tip")
    assert tab.focused("#prompt")
    tab.page.keyboard.type("Why is the sky blue?")
    press("Enter")
    expect(tab.page.locator("#send")).to_be_visible()
    for _ in range(20):
        press("Shift+Tab")
        style = "e => (s => [s.outlineStyle, s.outlineWidth])(getComputedStyle(document.activeElement))"
        assert tab.page.evaluate(style) == ["solid", "2px"]
        if tab.focused(".text"):
            break
    assert tab.focused(".text")
    for key, token in [("ArrowRight", 0), ("ArrowRight", 1), ("ArrowDown", 3), ("ArrowDown", 9), ("ArrowUp", 3)]:
        press(key)
        assert (
            tab.page.evaluate("() => [...document.querySelectorAll('.text .token')].indexOf(document.activeElement)")
            == token
        )
    expect(tip).to_contain_text("Round 2: 5 of 5 drafted accepted")
    assert tab.page.evaluate("() => document.activeElement.getAttribute('aria-describedby')") == "tip"
    press("End")
    expect(tip).to_contain_text(f"Token {TOKENS}")
    press("Home")
    expect(tip).to_contain_text("Token 1")
    press("Escape")
    assert tab.focused(".text")
    expect(tip).to_be_hidden()
    tab.page.focus("#settings-button")
    press("Enter")
    press("Enter")
    assert tab.focused("[name=drafter]")
    press("Escape")
    assert tab.focused("#settings-button")
    tab.page.focus("#prompt")
    fake.hold_at = 1
    tab.page.keyboard.type("And now")
    press("Shift+Enter")
    tab.page.keyboard.type("stop.")
    press("Enter")
    expect(tab.page.locator("#stop")).to_be_visible()
    press("Escape")
    expect(tab.page.locator("#send")).to_be_visible()
    assert fake.bodies[-1]["messages"][-1]["content"] == "And now\nstop."


def test_every_field_and_button_has_a_name(tab: Tab) -> None:
    """Check the roles and names in the accessibility tree, as screen readers read them."""
    tab.page.set_input_files("#picker", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"A"})
    tab.send()
    tab.page.set_input_files("#picker", {"name": "b.txt", "mimeType": "text/plain", "buffer": b"B"})
    tab.page.check("[name=compare]")
    for role, name in [
        *[("button", name) for name in ("Attach files", "Remove b.txt")],
        ("searchbox", "Search conversations"),
        *[("button", name) for name in ("New chat", "Dark theme", "Settings", "Send", "Conversations")],
        *[("switch", name) for name in ("Mark tokens", "Let the model think first")],
        *[("combobox", "Model"), ("textbox", "System prompt")],
        *[("spinbutton", name) for name in ("Draft length", "Temperature", "Top p", "Seed", "Max tokens")],
        *[("combobox", "Drafter"), ("switch", "Side by side with speculation off"), ("textbox", "Message")],
        ("radiogroup", "Order of the two replies"),
    ]:
        expect(tab.page.get_by_role(role, name=name)).to_have_count(1)  # type: ignore[arg-type]


def test_a_reply_is_read_out_by_sentences(tab: Tab) -> None:
    live = tab.page.locator("#live")
    assert live.get_attribute("aria-live") == "polite"
    tab.page.evaluate(
        "() => { window.said = []; new MutationObserver(() => said.push(document.querySelector('#live').textContent))"
        ".observe(document.querySelector('#live'), {childList: true}) }"
    )
    tab.send()
    said = tab.page.evaluate("() => said")
    assert " ".join(said).split() == TEXT.split()
    assert 1 < len(said) < len(SKY)
    assert tab.page.locator(".text[aria-live]").count() == 0


def test_nothing_inline_and_no_other_host(open_tab: Open, address: str) -> None:
    with open_tab(address) as tab:
        html = tab.page.request.get(address).text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|https?://", html)
        # A test of the tests: the policy is in force while they run.
        tab.page.evaluate(
            "() => document.body.insertAdjacentHTML('beforeend', '<i onclick=\"document.title=4\" id=i></i>')"
        )
        tab.page.evaluate("() => document.querySelector('#i').click()")
        assert tab.page.title() == "Paceline"
        assert len(tab.complaints) == 1
        tab.complaints.clear()


def test_phone_width(open_tab: Open, address: str, fake: Fake) -> None:
    with open_tab(address, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as tab:
        page = tab.page
        expect(page.locator("#settings")).to_be_hidden()
        assert tab.no_sideways_scroll()
        page.tap("#settings-button")
        page.check("[name=compare]")
        assert tab.no_sideways_scroll()
        page.tap("#settings-button")
        expect(page.locator("#settings")).to_be_hidden()
        on, off = tab.send("A" * 200).all()
        assert tab.no_sideways_scroll()
        boxes = [column.bounding_box() for column in (on, off)]
        assert boxes[0]["x"] == boxes[1]["x"]  # below one another
        on.locator(".token").nth(6).tap()
        tip = page.locator("#tip")
        expect(tip).to_be_visible()
        box = tip.bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        for button in page.locator("header button, #send").all():
            size = button.bounding_box()
            assert size
            assert size["height"] >= 32
            assert size["x"] + size["width"] <= 360


def test_overlaid_settings_close_when_they_lose_focus(open_tab: Open, address: str) -> None:
    with open_tab(address, viewport={"width": 700, "height": 740}) as tab:
        tab.page.click("#settings-button")
        assert tab.focused("[name=drafter]")
        for _ in range(12):
            tab.page.keyboard.press("Tab")
        expect(tab.page.locator("#settings")).to_be_hidden()


def test_the_end_stays_in_sight_unless_the_reader_scrolls_up(open_tab: Open, address: str, fake: Fake) -> None:
    at_end = "() => scrollY + innerHeight > document.documentElement.scrollHeight - 5"
    with open_tab(address, viewport={"width": 360, "height": 420}) as tab:
        tab.send()
        assert tab.page.evaluate(at_end)
        fake.hold_at = 3
        tab.page.fill("#prompt", "More")
        tab.page.press("#prompt", "Enter")
        expect(tab.page.locator(".turn").last.locator(".token")).to_have_count(13)
        tab.page.mouse.move(180, 200)
        tab.page.mouse.wheel(0, -300)
        tab.page.wait_for_timeout(200)
        stands = tab.page.evaluate("() => scrollY")
        fake.hold_at = None
        expect(tab.page.locator("#send")).to_be_visible()
        assert tab.page.evaluate("() => scrollY") == stands


def channels(colour: str) -> tuple[float, float, float, float]:
    red, green, blue, *alpha = (float(part) for part in re.findall(r"[\d.]+", colour))
    return red, green, blue, alpha[0] if alpha else 1.0


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = (part / 255 for part in channels(colour)[:3])
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


# Of each element with text of its own that is shown: its words, colour, and the first background behind it.
COLOURS = """() => [...document.querySelectorAll('body *')].filter(e =>
  e.checkVisibility({visibilityProperty: true}) && !e.matches(':disabled, option, .hidden, [role=switch]') &&
  (e.matches('input, textarea, select') || [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
).map(e => {
  const clear = e => getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)';
  let behind = e;
  while (behind.parentElement && clear(behind)) behind = behind.parentElement;
  const style = getComputedStyle(e), hint = getComputedStyle(e, '::placeholder').color;
  return [e.className + ' ' + e.textContent.slice(0, 20), style.color, getComputedStyle(behind).backgroundColor,
          e.placeholder ? hint : style.color];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_all_text(open_tab: Open, address: str, fake: Fake, scheme: str) -> None:
    with open_tab(address, color_scheme=scheme) as tab:
        found = tab.page.evaluate(COLOURS)
        fake.differ_at = 20
        tab.page.check("[name=compare]")
        tab.send()
        fake.fail = (400, "An error.")
        tab.send("Again", turns=2)
        tab.page.locator(".text .token").nth(3).hover()
        found += tab.page.evaluate(COLOURS)
        assert len(found) > 100
        assert (luminance(found[0][2]) < 0.2) == (scheme == "dark")
        poor = [(words, contrast(ink, ground)) for words, ink, ground, _ in found if contrast(ink, ground) < 4.5]
        poor += [(words, contrast(hint, ground)) for words, _, ground, hint in found if contrast(hint, ground) < 4.5]
        assert poor == []
        lines = """() => [...document.querySelectorAll('.token.correction, .token.bonus')].map(e =>
          (s => [s.textDecorationColor, s.backgroundColor])(getComputedStyle(e))).concat(
          [...document.querySelectorAll('input[type=number], select:enabled')].map(e =>
          (s => [s.borderTopColor, s.backgroundColor])(getComputedStyle(e))))"""
        assert min(contrast(*pair) for pair in tab.page.evaluate(lines)) >= 3


def test_theme_button_outweighs_the_system_and_is_remembered(tab: Tab) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(ground)
    tab.page.get_by_role("button", name="Dark theme").click()
    dark = tab.page.evaluate(ground)
    assert luminance(dark) < 0.05 < 0.8 < luminance(light)
    tab.page.reload()
    assert tab.page.evaluate(ground) == dark
    tab.page.get_by_role("button", name="Light theme").click()
    assert tab.page.evaluate(ground) == light


@pytest.mark.parametrize(("motion", "runs"), [("no-preference", 1), ("reduce", 0)])
def test_reduced_motion_disables_animations(open_tab: Open, address: str, fake: Fake, motion: str, runs: int) -> None:
    fake.hold_at = 1
    with open_tab(address, reduced_motion=motion) as tab:
        expect(tab.page.locator("#model")).not_to_be_empty()
        tab.page.fill("#prompt", "Why?")
        tab.page.press("#prompt", "Enter")
        expect(tab.page.locator(".text .token")).to_have_count(3)
        assert tab.page.evaluate("() => document.getAnimations().length") == runs
        fake.hold_at = None
        expect(tab.page.locator("#send")).to_be_visible()
