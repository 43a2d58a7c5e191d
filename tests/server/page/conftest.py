"""An open page in headless Chromium, for the tests in this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser_tab import Open, Tab, expect
from tests.support.fake_server import MODEL, Fake, serving
from tests.support.lazy import playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    # Of this folder only: while it lives, playwright's event loop is the running one of this thread.
    if not CHROMIUM:
        if os.environ.get("CI"):
            pytest.fail("chromium is missing: apt-get install chromium")
        pytest.skip("chromium is missing: apt-get install chromium, or name one in CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser) -> Open:
    @contextmanager
    def open_at(url: str, marks: bool = True, **options: Any) -> Iterator[Tab]:
        """Yield a tab. At the end, check that it logged no unexpected errors and contacted no other host.

        `marks` shows replies as marked tokens instead of formatted text.
        """
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(30_000)
        context.add_init_script(f"localStorage.marks ??= '{'on' if marks else 'off'}'")
        tab = Tab(context.new_page(), url)
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("console", lambda said: said.type == "error" and tab.complaints.append(said.text))
        tab.page.on("request", lambda asked: tab.hosts.add(asked.url.split("/")[2]))
        tab.page.goto(url)
        yield tab
        context.close()
        assert [line for line in tab.complaints if not line.startswith("Failed to load resource")] == []
        assert tab.hosts == {url.split("/")[2]}

    return open_at


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def address(fake: Fake) -> Iterator[str]:
    with serving(fake.app()) as url:
        yield url


@pytest.fixture
def tab(open_tab: Open, address: str) -> Iterator[Tab]:
    with open_tab(address) as tab:
        expect(tab.page.locator("#model")).to_have_value(MODEL)
        yield tab


@pytest.fixture
def formatted(open_tab: Open, address: str) -> Iterator[Tab]:
    """Return a tab that shows formatted text."""
    with open_tab(address, marks=False) as tab:
        expect(tab.page.locator("#model")).to_have_value(MODEL)
        yield tab
