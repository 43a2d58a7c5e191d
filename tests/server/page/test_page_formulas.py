"""Formulas in replies: TeX as MathML, prices as text, hostile formulas without effect and in bounded time."""

from __future__ import annotations

import pytest

from tests.support.browser_tab import DRAW, VIEW, Tab, expect
from tests.support.fake_server import Fake

pytestmark = pytest.mark.slow

SHOWN = f"""async ([text, step]) => {{
  const drawn = await ({VIEW})(text, step);
  const found = [...drawn.querySelectorAll('.formula')].map(e => [e.matches('.display'), e.textContent]);
  for (const element of drawn.querySelectorAll('.formula')) element.textContent = '□';
  return [found, [...drawn.children].map(e => e.textContent).join('¶')];
}}"""
"""JavaScript that returns the formulas in a text, as (on a separate line, MathML characters), and the other text."""


def shown(tab: Tab, text: str) -> tuple[list[tuple[bool, str]], str]:
    found, around = tab.page.evaluate(SHOWN, [text, len(text) or 1])
    return [(display, tex) for display, tex in found], around


FORMULAS: list[tuple[str, list[tuple[bool, str]], str]] = [
    ("so $x+y$ is", [(False, "x+y")], "so □ is"),
    (r"so \(x+y\), and \[x=1\]", [(False, "x+y"), (True, "x=1")], "so □, and □"),
    ("$$x+y$$", [(True, "x+y")], "□"),
    ("text\n$$\nx\n- y\n> z\n$$\nmore", [(True, "x\u2212y>z")], "text¶□more"),
    ("\\[\n  x\n+ y\n\\]\n\n- item", [(True, "x+y")], "□¶item"),
    ("- item\n  $$\n  - y\n  $$\n- $z$", [(True, "\u2212y"), (False, "z")], "item□□"),
    ("| $a$ | b |\n|---|---|\n| 1 | $c$ |", [(False, "a"), (False, "c")], "□b1□"),
    ("**bold $a*b$** *and $c_1$*", [(False, "a\u2217b"), (False, "c1")], "bold □ and □"),
    ("$F = ma$, $pV = nRT$", [(False, "F=ma"), (False, "pV=nRT")], "□, □"),
    ("其中$x$是", [(False, "x")], "其中□是"),
    (r"$\text{a \$5 bill}$", [(False, "a\xa0$5\xa0bill")], "□"),
]
PROSE = [
    "$5 and $10",
    "It costs $5, not $10.",
    "US$5 and US$7",
    "$5-$10 or 20$",
    "from $10 to 20$ each",
    "$HOME and $PATH and $HOME/$USER",
    "$ x $",
    "a $ b",
    "$$",
    "$$ $$",
    r"\(",
    r"\(x",
    r"\[not a formula\]",
    "$x",
    "$$\nx\n\ny",
]  # fmt: skip
CODE = ["`$x$`", "`` $$x$$ ``", "```\n$x$\n$$y$$\n```", "$5 `a$`"]


def test_formulas(tab: Tab) -> None:
    for text, formulas, around in FORMULAS:
        assert shown(tab, text) == (formulas, around), text


def test_prices_and_code_are_no_formulas(tab: Tab) -> None:
    for text in PROSE + CODE:
        assert shown(tab, text)[0] == [], text
    for text in PROSE:
        assert shown(tab, text)[1].replace("¶", "\n\n") == text, text


PIECES = (
    *("$", "$$", "\n$$\n", r"\(", r"\)", "\\[", "\\]\n", "x", " ", "\n", "\n\n"),
    *("- y\n", "`", r"\frac12", "5", "{", "}", "> z\n"),
)


def test_a_text_with_formulas_that_grows_is_drawn_as_the_whole(tab: Tab) -> None:
    tab.check_growth(PIECES, 200)


REFUSED = [
    *(r"$\nosuchcommand{x}$", r"$\frac{1}$", "$x^$", "$a_1_2$", r"$\left( x$"),
    *(r"$\def\a{x}\a$", r"$\gdef\a{x}\a$", r"$\newcommand\a{x}\a$", r"$\let\a\b$"),
    *("$" + r"\sqrt{" * 100 + "x" + "}" * 100 + "$", "$" + "x+" * 2000 + "x$"),
]


def test_a_wrong_formula_stays_text(tab: Tab) -> None:
    for tex in REFUSED:
        assert shown(tab, f"so {tex} is") == ([], f"so {tex} is")


HOSTILE = [
    r"\href{javascript:window.hit=1}{x}",
    r"\url{javascript:window.hit=1}",
    r"\includegraphics{https://evil.example/x.png}",
    r"\htmlId{prompt}{x}",
    r"\class{busy}{x}",
    r"\text{<img src=x onerror=window.hit=1>}",
    r"\color{red;background:url(https://evil.example/x)}x",
    r"\label{prompt}x \ref{prompt}",
    r"\begin{align}x\label{prompt}\end{align}",
    r"\rule{9000em}{9000em}",
    r"\kern-900em\raisebox{900em}{x}",
    r"\style{position:fixed}{x}",
]


def test_hostile_formulas_have_no_effect(formatted: Tab, fake: Fake) -> None:
    fake.text = "\n\n".join(f"$${tex}$$" for tex in HOSTILE) + "\n\nend"
    text = formatted.send()
    expect(text).to_contain_text("end")
    allowed = "all => all.flatMap(e => e.getAttributeNames()).filter(n => /^(on|id|src|href|xlink)/.test(n))"
    assert text.locator("*").evaluate_all(allowed) == []
    styles = text.locator("[style]").evaluate_all("all => all.map(e => e.getAttribute('style')).join()")
    assert "url" not in styles
    assert "fixed" not in styles
    assert formatted.page.evaluate("() => window.hit") is None
    assert formatted.no_sideways_scroll()
    box = text.bounding_box()
    assert box
    assert box["height"] < 6000
    # The message above can be clicked: no part of a formula lies on it.
    formatted.page.locator(".bubble").click(trial=True)


NESTS = [
    *("{", r"\sqrt{", r"\frac{1}{", "x^{", r"\left(", r"\begin{pmatrix}", r"\text{$", r"\overline{", r"\binom{1}{"),
    *(r"\bold", r"\displaystyle", r"\def\a{\a\a}\a", r"\gdef\b{" + "x" * 900 + "}" + r"\b" * 400, r"\color{red}", "'"),
]
ENDS = {r"\left(": r"\right)", r"\begin{pmatrix}": r"\end{pmatrix}", r"\text{$": "$}"}


def test_no_formula_is_slow(formatted: Tab, fake: Fake) -> None:
    """Without limits, each formula would take minutes or overflow the browser's stack."""
    for start in NESTS:
        for size in (3900, 100_000):
            count = size // len(start) if len(start) < 100 else 1
            for text in (start * count, start * (count // 3) + "x" + ENDS.get(start, "}") * (count // 3)):
                formatted.page.evaluate(DRAW, [f"$${text}$$", size])
                formatted.page.evaluate(DRAW, [f"${text}$ " * (8000 // len(text)), size])
    fake.text = (
        "$$" + "x_1+" * 900 + "x$$\n\n$$" + r"\sqrt{" * 50 + "x" + "}" * 50 + "$$\n\n" + "{" * 10_000 + "\n\nend"
    )
    expect(formatted.send()).to_contain_text("end")


def test_a_growing_paragraph_draws_each_formula_once(formatted: Tab, fake: Fake) -> None:
    fake.text = " ".join(f"$x_{{{i}}}$ and then" for i in range(300))
    fake.size, fake.pause = 40, 0.004
    counted = "() => { const { render } = temml; window.drawn = 0; temml.render = (...a) => (drawn++, render(...a)); }"
    formatted.page.evaluate(counted)
    text = formatted.send()
    expect(text.locator("math")).to_have_count(300)
    assert formatted.page.evaluate("() => drawn") == 300


def test_direction_of_a_block_is_its_own(formatted: Tab, fake: Fake) -> None:
    fake.text = "English.\n\nשלם\n\n- שלם\n- אחד\n\n$x$ היא\n\n```\ncode\n```"
    text = formatted.send("שלם\nHello")
    found = text.locator("> *").evaluate_all("all => all.map(e => getComputedStyle(e).direction)")
    assert found == ["ltr", "rtl", "rtl", "rtl", "ltr"]
    assert text.locator("math").evaluate("e => getComputedStyle(e).direction") == "ltr"
    direction = "e => getComputedStyle(e).direction"
    for selector in (".bubble", "#list .open"):
        assert formatted.page.locator(selector).evaluate(direction) == "rtl"
    formatted.page.fill("#prompt", "שלם")
    assert formatted.page.locator("#prompt").evaluate(direction) == "rtl"
    assert formatted.page.locator("#settings-title").evaluate(direction) == "ltr"
