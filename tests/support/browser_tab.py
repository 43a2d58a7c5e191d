"""An open page in a browser, for the page's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.lazy import playwright

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def expect(part: Locator | Page) -> Any:
    """Return playwright's assertions about a part of the page.

    Their timeout is long enough for a busy machine with two cores. Only failing assertions wait that long.
    """
    playwright.expect.set_options(timeout=30_000)
    return playwright.expect(part)


@dataclass
class Tab:
    """An open page, with its console errors and the hosts that it contacted."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def send(self, text: str = "Why is the sky blue?", turns: int = 1) -> Locator:
        """Send a message and wait for its reply. Return the element with the reply's text.

        Args:
            text: The message.
            turns: Number of turns after the reply.
        """
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        expect(self.page.locator(".turn")).to_have_count(turns)
        expect(self.page.locator("#send")).to_be_visible()
        return self.page.locator(".turn").last.locator(".text")

    @property
    def status(self) -> Locator:
        """The element that shows problems with the server."""
        return self.page.locator("#status")

    def check_growth(self, pieces: Sequence[str], count: int) -> None:
        """Check that `count` random texts that grow by 1 or 7 characters are drawn the same as whole texts."""
        draw = random.Random(0)
        for _ in range(count):
            text = "".join(draw.choices(pieces, k=14))
            whole = self.page.evaluate(DRAW, [text, len(text)])
            for step in (1, 7):
                assert self.page.evaluate(DRAW, [text, step]) == whole, text

    def focused(self, selector: str) -> bool:
        return bool(self.page.evaluate("s => document.activeElement.matches(s)", selector))

    def no_sideways_scroll(self) -> bool:
        return bool(self.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))


Open = Callable[..., Any]

VIEW = """async (text, step) => {
  const { FormattedView } = await import('./views.js');
  const view = new FormattedView();
  for (let end = step; end < text.length; end += step) view.draw({ content: text.slice(0, end) });
  while (!view.draw({ content: text }));
  return view.element;
}"""
"""JavaScript function that draws a text that grows by `step` characters, and returns its element."""

DRAW = f"async ([text, step]) => (await ({VIEW})(text, step)).innerHTML"
"""JavaScript function that returns the HTML of that element."""
