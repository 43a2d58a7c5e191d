"""Replies as formatted text: Markdown in full, hostile text without effect, long text in bounded steps."""

from __future__ import annotations

import re

import pytest

from tests.support.browser_tab import DRAW, Tab, expect
from tests.support.fake_server import Fake

pytestmark = pytest.mark.slow


def html(tab: Tab, text: str) -> str:
    drawn = str(tab.page.evaluate(DRAW, [text, len(text) or 1]))
    return re.sub(r' (rel|target|title|role|tabindex|aria-label|dir)="[^"]*"', "", drawn)


CASES: list[tuple[str, str]] = [
    ("plain & <b>text</b>", "<p>plain &amp; &lt;b&gt;text&lt;/b&gt;</p>"),
    ("two\nlines\n\nand more", "<p>two\nlines</p><p>and more</p>"),
    ("# One\n### Three #", '<h4 class="level1">One</h4><h6 class="level3">Three</h6>'),
    ("#hashtag", "<p>#hashtag</p>"),
    ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
    ("***both*** ~~gone~~", "<p><em><strong>both</strong></em> <del>gone</del></p>"),
    ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
    ("_so_ **open", "<p><em>so</em> **open</p>"),
    (r"\*no\* and \$5", "<p>*no* and $5</p>"),
    ("`a*b*` `` c`d ``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    ("- a\n- b\n  - c\n\n  more\n- d", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul><p>more</p></li>"
     "<li><p>d</p></li></ul>"),
    ("3. three\n4. four", '<ol start="3"><li><p>three</p></li><li><p>four</p></li></ol>'),
    ("text\n- a\n- b\n\nend", "<p>text</p><ul><li><p>a</p></li><li><p>b</p></li></ul><p>end</p>"),
    ("- [x] done\n- [ ] not", '<ul><li><span class="task">☑</span><p>done</p></li>'
     '<li><span class="task">☐</span><p>not</p></li></ul>'),
    ("> said\n> she", "<blockquote><p>said\nshe</p></blockquote>"),
    ("---", "<hr>"),
    ("|a|b|\n|:-:|--:|\n|1 \\| 2|**3**|\nafter", '<div class="table"><table><thead><tr><th class="center">a</th>'
     '<th class="end">b</th></tr></thead><tbody><tr><td class="center">1 | 2</td><td class="end"><strong>3</strong>'
     "</td></tr></tbody></table></div><p>after</p>"),
    ("|a|b|\n|-|-|\n|1|\n|1|2|3|", '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>'
     "<td>1</td></tr><tr><td>1</td><td>2</td></tr></tbody></table></div>"),
    ("a | b\nno table", "<p>a | b\nno table</p>"),
    ("[t](https://a.b/c?d=e#f)", '<p><a href="https://a.b/c?d=e#f">t</a></p>'),
    ("see https://a.b/c_(d), or (https://e.f).", '<p>see <a href="https://a.b/c_(d)">https://a.b/c_(d)</a>, or '
     '(<a href="https://e.f/">https://e.f</a>).</p>'),
    ("![a cat](https://a.b/cat.png)", '<p><a href="https://a.b/cat.png">a cat</a></p>'),
    ("one<br>two", "<p>one<br>two</p>"),
    ("", ""),
]  # fmt: skip


def test_markdown(tab: Tab) -> None:
    for text, drawn in CASES:
        assert html(tab, text) == drawn, text


def test_code_within_an_item(tab: Tab) -> None:
    found = html(tab, "1. a\n   ```\n   x\n\n     y\n   ```\n2. b")
    assert found.count("<li>") == 2
    assert '<span class="piece">x\n\n  y</span>' in found


PIECES = (
    *(
        "# Title\n",
        "para *em* `code` **bo",
        "ld** text\n",
        "\n\n",
        "- item\n",
        "  - inner\n",
        "1. one\n",
        "   2. two\n",
    ),
    *(
        "```py\n",
        "x = 1\n",
        "```\n",
        "> quote\n",
        "| a | b |\n",
        "|---|---|\n",
        "| 1 | 2 |\n",
        "---\n",
        "~~~\n",
        "    deep\n",
    ),
    *("[l](https://a.b)\n", "- [ ] do\n", "\t\n", "text", " ", "\n", "*", "`"),
)


def test_a_text_that_grows_is_drawn_as_the_whole(tab: Tab) -> None:
    tab.check_growth(PIECES, 150)


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1><a xlink:href='javascript:window.hit=1'>x</a></svg>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1)",
    "[click](java&#115;cript:window.hit=1)",
    "[click](\u0001javascript:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "[click](vbscript:hit)",
    "[click](//evil.example/x)",
    "[click](/v1/models)",
    "[click](file:///etc/passwd)",
    "<javascript:window.hit=1>",
    '[click](https://a.b/" onmouseover="window.hit=1)',
    "[click](https://a.b 'x\" onmouseover=\"window.hit=1')",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:window.hit=1)",
    '[<img src=x onerror="window.hit=1">](https://a.b)',
    '```<img src=x onerror="window.hit=1">\n<script>window.hit=1</script>\n```',
    "| <script>window.hit=1</script> | b |\n|---|---|\n| <img src=x onerror=window.hit=1> | 2 |",
    "# <img src=x onerror=window.hit=1>",
    "- <details open ontoggle=window.hit=1>",
    "<form action=https://evil.example><button>x</button></form><style>*{display:none}</style>",
    "<b id=prompt name=turns>x</b>",
]
TAGS = (
    "A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H4 H5 H6 HR LI OL P PATH PRE SPAN STRONG SVG TABLE TBODY TD TH THEAD TR UL"
)


def test_hostile_text_has_no_effect(formatted: Tab, fake: Fake) -> None:
    fake.text = "\n\n".join(HOSTILE)
    text = formatted.send()
    expect(text).to_contain_text("id=prompt name=turns")
    found = text.locator("*").evaluate_all(
        "all => all.map(e => [e.tagName.toUpperCase(), e.id, e.getAttributeNames(), e.getAttribute('href')])"
    )
    assert {tag for tag, *_ in found} <= set(TAGS.split())
    assert not [names for *_, names, _ in found if any(name.startswith(("on", "src", "style")) for name in names)]
    assert not [ident for _, ident, *_ in found if ident]
    links = [href for *_, href in found if href]
    assert links
    assert all(href.startswith("https://") for href in links)
    for button in text.locator("a, button").all():
        button.hover()
    assert formatted.page.evaluate("() => window.hit") is None
    # The fixture checks that no other host was asked: the image is not fetched.
    relations = text.locator("a").evaluate_all("all => all.map(a => [a.rel, a.target])")
    assert {tuple(one) for one in relations} == {("noopener noreferrer nofollow", "_blank")}


SLOW = ["*a ", "**a", "_a ", "`" , "``a`", "[", "[a](", "![a](b", "~~a", "<a", "> ", ">", "- ", "  - a\n", "|a", "1. ",
        "https://a(",
        "$", "$a", "$a ", "$a$", "$$a", "$$a$$", "\\(", "\\(a", "\\[a\n", "\\(a\\)",
        "\\", "***a** ", "[a [b] ", "```\n", "\n", " \n", "| a |\n|---|\n", "#", "a\n"]  # fmt: skip


def test_no_text_is_slow(tab: Tab) -> None:
    """Each text would take minutes if the work were quadratic in its length or worse."""
    gap = " " * 7900
    lines = [f"```{gap}`\n", f"a | b\n-{gap}x |\n", f"a | b\n{gap}-x|\n", f"` {'a' * 7900}`\n", f"-{gap}-{gap}x\n"]
    for piece in SLOW + lines:
        text = piece * (40_000 // len(piece))
        drawn = tab.page.evaluate(DRAW, [text, 20_000])
        assert bool(drawn) == bool(text.strip())


WATCH = """() => {
  window.work = 0;
  new MutationObserver((records) => {
    for (const { addedNodes } of records) for (const node of addedNodes) window.work += node.textContent.length;
  }).observe(document.querySelector('#turns'), { childList: true, subtree: true });
}"""


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("```\n" + "a line of code\n" * 4000, 3),
        ("A sentence of some words. " * 2500, 12),  # blocks of up to 8,000 characters are drawn again while they grow
        ("- An item of a long list.\n" * 2500, 3),
        ("A paragraph.\n\n" * 4000, 3),
    ],
    ids=["code", "one line", "list", "paragraphs"],
)
def test_a_long_reply_takes_linear_time(formatted: Tab, fake: Fake, text: str, times: int) -> None:
    """Redrawing the whole reply in each frame would insert its text dozens of times."""
    fake.text, fake.size, fake.pause = text, len(text) // 150, 0.008
    formatted.page.evaluate(WATCH)
    reply = formatted.send()
    assert reply.evaluate("e => e.textContent").count("e") >= text.count("e")
    work = formatted.page.evaluate("() => work")
    assert len(text) / 2 < work < times * len(text)


def test_code_and_replies_can_be_copied(formatted: Tab, fake: Fake) -> None:
    code = "def f() -> str:\n    return '<b>&amp;</b>'"
    fake.text = f"So:\n\n```python\n{code}\n```\n\nThat is **all**."
    page = formatted.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    formatted.send()
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(1)
    assert page.evaluate("() => navigator.clipboard.readText()") == code
    page.get_by_role("button", name="Copy reply").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == fake.text
    # The clipboard interface needs TLS or localhost.
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.get_by_role("button", name="Copy message").click()
    page.evaluate("() => delete navigator.clipboard")
    assert page.evaluate("() => navigator.clipboard.readText()") == "Why is the sky blue?"


def test_tokens_can_be_marked_and_formatted_again(formatted: Tab, fake: Fake) -> None:
    fake.text = "Some **bold** text."
    text = formatted.send()
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator(".token")).to_have_count(0)
    formatted.page.get_by_role("switch", name="Mark tokens").check()
    expect(text.locator(".token").first).to_be_visible()
    assert text.evaluate("e => e.textContent") == fake.text
    formatted.page.get_by_role("switch", name="Mark tokens").uncheck()
    expect(text.locator("strong")).to_have_text("bold")
