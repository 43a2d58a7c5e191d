"""Chat on the page at `/`: requests, displayed answers, and errors."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser_tab import Open, Tab, expect
from tests.support.fake_server import MARKUP, SKY, Fake, serving

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.slow

TEXT = "".join(text for _, texts in SKY for text in texts)
TOKENS = sum(len(texts) for _, texts in SKY)


def kinds(text: Locator) -> list[str]:
    return [
        name.removeprefix("token ") for name in text.locator(".token").evaluate_all("all => all.map(t => t.className)")
    ]


def numbers(tab: Tab) -> str:
    return tab.page.locator(".turn").last.locator(".numbers").first.inner_text()


def test_reply_is_marked_by_how_each_token_came(tab: Tab, fake: Fake) -> None:
    text = tab.send()
    assert text.evaluate("e => e.textContent") == TEXT
    assert text.evaluate("e => getComputedStyle(e).whiteSpace") == "pre-wrap"
    assert kinds(text)[:10] == ["draft", "draft", "correction", *["draft"] * 5, "bonus", "draft"]
    assert kinds(text)[13] == "plain"
    style = "e => (s => [s.backgroundColor, s.textDecorationStyle, s.textDecorationLine])(getComputedStyle(e))"
    looks = {kind: text.locator(f".{kind}").first.evaluate(style) for kind in ("draft", "correction", "bonus", "plain")}
    assert len({look[0] for look in looks.values()}) == 4  # four tints
    # ... and for whoever does not see them: a tint without a line, a dashed, a double, nothing.
    assert [looks[kind][1] for kind in ("correction", "bonus")] == ["dashed", "double"]
    assert looks["draft"][2] == looks["plain"][2] == "none"
    assert fake.bodies[0]["stream"] is fake.bodies[0]["trace"] is True


def test_legend_names_every_mark(tab: Tab) -> None:
    tab.send()
    legend = tab.page.locator(".legend .token")
    assert legend.all_inner_texts() == ["drafted", "corrected", "bonus", "plain"]
    assert kinds(tab.page.locator(".legend")) == ["draft", "correction", "bonus", "plain"]


def test_tokens_arrive_one_round_at_a_time_with_live_numbers(tab: Tab, fake: Fake) -> None:
    fake.hold_at = 2
    tab.page.fill("#prompt", "Why?")
    tab.page.press("#prompt", "Enter")
    tokens = tab.page.locator(".text .token")
    expect(tokens).to_have_count(9)
    expect(tab.page.locator(".numbers")).to_contain_text("4.50 tokens per round")
    assert tab.page.locator(".line .accepted").count() == 2
    fake.hold_at = 5
    expect(tokens).to_have_count(len([text for _, texts in SKY[:5] for text in texts]))
    fake.hold_at = None
    expect(tab.page.locator("#send")).to_be_visible()
    seen = numbers(tab)
    assert f"{TOKENS / len(SKY):.2f} tokens per round" in seen
    assert f"{TOKENS} tokens" in seen
    assert re.search(r"[\d.]+ tok/s", seen)
    drafted = sum(drafted for drafted, _ in SKY)
    assert f"{round(100 * (TOKENS - len(SKY)) / drafted)} % accepted" in seen
    tab.page.locator(".numbers").click()
    chart = tab.page.get_by_role("img", name="Acceptance over time")
    accepted = f"{TOKENS - len(SKY)} of {drafted} drafted tokens accepted in {len(SKY)} rounds"
    expect(chart).to_have_attribute("aria-label", f"Acceptance over time: {accepted}")
    heights = {
        name: [
            float(high)
            for high in chart.locator(f".{name}").evaluate_all("all => all.map(e => e.height.baseVal.value)")
        ]
        for name in ("drafted", "accepted")
    }
    unit = heights["drafted"][0] / 4  # the first round drafted four tokens and accepted two
    assert heights["drafted"] == pytest.approx([unit * drafted for drafted, _ in SKY], abs=0.01)
    assert heights["accepted"] == pytest.approx([unit * (len(texts) - 1) for _, texts in SKY], abs=0.01)


def test_the_progress_of_a_long_prompt_is_shown_until_the_reply_begins(tab: Tab, fake: Fake) -> None:
    fake.read, fake.hold_at = (3200, 12_034), 0
    tab.page.fill("#prompt", "a long prompt")
    tab.page.press("#prompt", "Enter")
    line = tab.page.get_by_text("Reading the prompt: 3,200 of 12,034 tokens")
    expect(line).to_be_visible()
    fake.hold_at = None
    expect(tab.page.locator("#send")).to_be_visible()
    expect(line).to_have_count(0)


def test_pointing_at_a_token_tells_its_probability_and_drafter(tab: Tab) -> None:
    text, tip = tab.send(), tab.page.locator("#tip")
    expect(tip).to_be_hidden()
    text.locator(".token").nth(1).hover()
    expect(tip).to_contain_text("␣sky")
    expect(tip).to_contain_text("Drafted and accepted")
    expect(tip).to_contain_text(re.compile(r"Probability \d+\.\d %"))
    expect(tip).to_contain_text("Drafter suffix")
    expect(tip).to_contain_text("Round 1: 2 of 4 drafted accepted, 31 ms")
    text.locator(".correction").first.hover()
    expect(tip).to_contain_text("Corrected")
    expect(tip).not_to_contain_text("Drafter")
    tab.page.mouse.move(2, 400)
    expect(tip).to_be_hidden()


def test_side_by_side_says_that_both_are_the_same(tab: Tab, fake: Fake) -> None:
    fake.pause = 0.002
    tab.page.check("[name=compare]")
    on, off = tab.send().all()
    assert on.evaluate("e => e.textContent") == off.evaluate("e => e.textContent") == TEXT
    assert set(kinds(off)) == {"plain"}
    expect(tab.page.locator(".verdict")).to_contain_text(f"Same text, token for token. {TOKENS} tokens.")
    expect(tab.page.locator(".verdict")).to_contain_text(
        re.compile(r"With speculation [\d.]+ times the tokens per second\.$")
    )
    first, second = fake.bodies
    assert first.pop("speculation") == "auto"
    assert second.pop("speculation") == "off"
    assert first == second  # the same prompt, seed and sampling
    assert all(a[1] <= b[0] for a, b in pairwise(fake.times))  # one after the other


def test_side_by_side_at_the_same_time(tab: Tab, fake: Fake) -> None:
    fake.hold_at = 1
    tab.page.check("[name=compare]")
    tab.page.check("[value=parallel]")
    tab.page.fill("#prompt", "Why?")
    tab.page.press("#prompt", "Enter")
    for column in tab.page.locator(".text").all():
        expect(column.locator(".token").first).to_be_visible()
    assert len(fake.bodies) == 2
    fake.hold_at = None
    expect(tab.page.locator(".verdict")).to_contain_text("the replies shared the machine")


@pytest.mark.parametrize(("exact", "reason"), [("bits", "should not happen"), ("rounding", "exact up to rounding")])
def test_side_by_side_says_where_texts_part(tab: Tab, fake: Fake, exact: str, reason: str) -> None:
    fake.differ_at, fake.guarantee = 20, exact
    tab.page.reload()
    tab.page.check("[name=compare]")
    tab.send()
    expect(tab.page.locator(".verdict.differs")).to_contain_text("The texts differ from token 21 on.")
    expect(tab.page.locator(".verdict.differs")).to_contain_text(reason)
    assert [token.inner_text().strip() for token in tab.page.locator(".token.differs").all()] == ["more", "different"]


def test_off_beside_off_is_not_offered(tab: Tab, fake: Fake) -> None:
    tab.page.select_option("[name=drafter]", "off")
    expect(tab.page.locator("[name=max_draft]")).to_be_disabled()
    tab.page.check("[name=compare]")
    expect(tab.page.locator("[name=drafter]")).to_have_value("auto")
    expect(tab.page.locator("option[value=off]")).to_be_disabled()


@pytest.mark.parametrize(
    ("drafter", "length", "speculation"),
    [
        ("auto", "", "auto"),
        ("off", "", "off"),
        ("eagle3", "", {"drafter": "eagle3"}),
        ("ngram", "5", {"drafter": "ngram", "max_draft": 5}),
        ("auto", "3", {"max_draft": 3}),
    ],
)
def test_settings_reach_the_request(tab: Tab, fake: Fake, drafter: str, length: str, speculation: Any) -> None:
    options = tab.page.locator("[name=drafter] option").all_inner_texts()
    assert options == ["auto", "suffix", "ngram", "eagle3", "off"]
    values = {"temperature": 0.25, "top_p": 0.9, "seed": 7, "max_tokens": 11}
    for name, value in values.items():
        tab.page.fill(f"[name={name}]", str(value))
    tab.page.select_option("[name=drafter]", drafter)
    if length:
        tab.page.fill("[name=max_draft]", length)
    tab.send("Hello")
    assert fake.bodies == [
        {
            "model": "SmolLM2-360M-Instruct",
            "messages": [{"role": "user", "content": "Hello"}],
            **values,
            "speculation": speculation,
            "stream": True,
            "stream_options": {"include_usage": True},
            "trace": True,
            "return_progress": True,
        }
    ]


def test_a_setting_out_of_range_is_not_sent(tab: Tab, fake: Fake) -> None:
    tab.page.fill("[name=top_p]", "1.5")
    tab.page.fill("#prompt", "Hello")
    tab.page.press("#prompt", "Enter")
    assert tab.focused("[name=top_p]")
    assert fake.bodies == []
    expect(tab.page.locator("#prompt")).to_have_value("Hello")


def test_sampling_is_the_models_unless_it_is_set(open_tab: Open, fake: Fake) -> None:
    fake.loaded = set()
    with serving(fake.app()) as url, open_tab(url) as tab:
        temperature = tab.page.locator("[name=temperature]")
        expect(temperature).to_have_attribute("placeholder", "auto")
        tab.send()
        expect(temperature).to_have_attribute("placeholder", "0.6")
        expect(temperature).to_have_value("")
        tab.send("Again", turns=2)
        assert not fake.bodies[0].keys() & {"temperature", "top_p"}
        assert not fake.bodies[1].keys() & {"temperature", "top_p"}
        temperature.fill("0.3")
        tab.send("Again", turns=3)
        assert fake.bodies[2]["temperature"] == 0.3
        tab.page.locator(".numbers").last.click()
        expect(tab.page.locator(".acceptance").last).to_contain_text("temperature 0.3, top p 0.95")


@pytest.mark.parametrize("marks", [True, False])
def test_a_reply_that_the_limit_cut_can_go_on(open_tab: Open, address: str, fake: Fake, marks: bool) -> None:
    with open_tab(address, marks=marks) as tab:
        tab.page.fill("[name=max_tokens]", "4")
        text = tab.send()
        cut = tab.page.locator(".cut")
        expect(cut).to_contain_text("Cut off at the limit of 4 tokens.")
        cut.get_by_role("button", name="Raise the limit").click()
        assert tab.focused("[name=max_tokens]")
        cut.get_by_role("button", name="Continue").click()
        expect(tab.page.locator("#send")).to_be_visible()
        assert fake.bodies[1]["continue_final_message"] is True
        begun = "".join(text for _, texts in SKY[:4] for text in texts)
        assert fake.bodies[1]["messages"][-1] == {"role": "assistant", "content": begun}
        expect(cut).to_have_count(1)
        tab.page.fill("[name=max_tokens]", "99")
        cut.get_by_role("button", name="Continue").click()
        expect(cut).to_have_count(0)
        expect(text).to_contain_text("red and orange.")
        if marks:
            assert text.evaluate("e => e.textContent") == TEXT
        expect(tab.page.locator(".numbers")).to_contain_text(f"{TOKENS} tokens")


def test_a_continuation_that_failed_can_be_tried_again(tab: Tab, fake: Fake) -> None:
    tab.page.fill("[name=max_tokens]", "4")
    text = tab.send()
    fake.fail = (429, "The queue is full.")
    tab.page.get_by_role("button", name="Continue").click()
    expect(tab.page.locator(".turn [role=alert]")).to_contain_text("The queue is full.")
    fake.fail = None
    tab.page.fill("[name=max_tokens]", "99")
    tab.page.get_by_role("button", name="Try again").click()
    expect(text).to_contain_text("red and orange.")
    assert text.evaluate("e => e.textContent") == TEXT
    expect(tab.page.locator(".turn [role=alert]")).to_have_count(0)


def test_conversation_goes_on_and_begins_anew(tab: Tab, fake: Fake) -> None:
    tab.send("One")
    tab.send("Two", turns=2)
    said = [(message["role"], message["content"]) for message in fake.bodies[-1]["messages"]]
    assert said == [("user", "One"), ("assistant", TEXT), ("user", "Two")]
    tab.page.click("#new")
    expect(tab.page.locator(".turn")).to_have_count(0)
    expect(tab.page.locator("#intro")).to_be_visible()
    tab.send("Three")
    assert len(fake.bodies[-1]["messages"]) == 1


def test_stop_keeps_what_there_is_and_tells_the_server(tab: Tab, fake: Fake) -> None:
    fake.hold_at = 2
    tab.page.fill("#prompt", "Why?")
    tab.page.press("#prompt", "Enter")
    expect(tab.page.locator(".text .token")).to_have_count(9)
    tab.page.click("#stop")
    expect(tab.page.get_by_text("Stopped.")).to_be_visible()
    expect(tab.page.locator("#send")).to_be_visible()
    assert fake.gone.wait(30)
    fake.hold_at = None
    tab.send("Go on", turns=2)
    assert fake.bodies[-1]["messages"][1]["content"] == "The sky looks blue because sunlight is scattered by"


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (400, "top_k must be positive, but is -1.", "top_k must be positive, but is -1."),
        (429, "The queue is full.", "The queue is full. (try again in about 3 s)"),
    ],
)
def test_a_refusal_is_shown_in_place_and_can_be_tried_again(
    tab: Tab, fake: Fake, status: int, message: str, shown: str
) -> None:
    fake.fail = (status, message)
    tab.send()
    expect(tab.page.locator(".turn [role=alert]")).to_have_text(shown)
    fake.fail = None
    tab.page.get_by_role("button", name="Try again").click()
    expect(tab.page.locator(".turn .token")).to_have_count(TOKENS - 1)  # one token has no text of its own
    expect(tab.page.locator(".turn [role=alert]")).to_have_count(0)
    assert len(fake.bodies[-1]["messages"]) == 1


def test_an_error_within_a_stream_leaves_the_text_so_far(tab: Tab, fake: Fake) -> None:
    fake.break_after = 2
    text = tab.send()
    expect(tab.page.locator(".turn [role=alert]")).to_have_text("Non-finite logits: the reply was ended.")
    assert text.evaluate("e => e.textContent") == "The sky looks blue because sunlight is scattered by"


def test_a_server_that_is_gone(open_tab: Open) -> None:
    with serving(Fake().app()) as url, open_tab(url) as tab:
        expect(tab.page.locator("#model")).not_to_be_empty()
        tab.page.route("**/v1/chat/completions", lambda route: route.abort())
        tab.send()
        expect(tab.page.locator(".turn [role=alert]")).to_contain_text("The server cannot be reached.")


def test_a_server_that_is_gone_from_the_start(open_tab: Open, fake: Fake, address: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}}
    with open_tab(address, **phone) as tab:
        tab.page.route("**/v1/models", lambda route: route.abort())
        tab.page.reload()
        expect(tab.status).to_contain_text("The server cannot be reached.")
        tab.page.unroute("**/v1/models")
        tab.send()
        assert len(fake.bodies) == 1


def test_api_key_is_asked_for_and_kept_in_this_tab(open_tab: Open) -> None:
    fake = Fake(key="secret")
    with serving(fake.app()) as url, open_tab(url) as tab:
        page = tab.page
        expect(page.get_by_label("This server requires an API key")).to_be_focused()
        expect(page.locator("#key-error")).to_be_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("Enter a key that it was started with: --api-key")
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        tab.send()
        assert len(fake.bodies) == 1
        kept = page.evaluate("() => [[sessionStorage['api-key']], JSON.stringify(localStorage), document.cookie]")
        assert kept == [["secret"], '{"marks":"on"}', ""]
        fake.key = "another"
        tab.send("Again", turns=2)
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator(".turn [role=alert]")).to_have_text("The server requires an API key. Enter it above.")


def test_markup_in_a_reply_or_a_message_stays_text(tab: Tab, fake: Fake) -> None:
    text = tab.send("markup <b>bold</b><img src=x onerror='document.title=3'>")
    assert text.evaluate("e => e.textContent") == "".join(text for _, texts in MARKUP for text in texts)
    text.locator(".token").last.hover()
    text.locator(".token").nth(3).focus()
    assert tab.page.locator("main img, main script, main b:not(.numbers b), #tip img, #tip script").count() == 0
    assert tab.page.title() == "Paceline"
    expect(tab.page.locator(".message p")).to_have_text("markup <b>bold</b><img src=x onerror='document.title=3'>")
