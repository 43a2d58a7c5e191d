"""Take the screenshots of the chat page that docs/how-to/serve.md shows: `python docs/screenshots.py`.

The script serves the demo model, asks it on the page in headless Chromium, and writes docs/how-to/images. Seed and
settings are fixed, so the replies are always the same. Only their speed depends on the machine.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "how-to" / "images"
PORT = 8931
ADDRESS = f"http://127.0.0.1:{PORT}/"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}
CODE = "Write a small Python class for a bank account, then the same class with type hints."
LIST = "List three kinds of bread, each with a short description."
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


def ask(page: Page, prompt: str, tokens: int = 320) -> None:
    """Send a message and wait for the end of the reply."""
    if not page.locator("#settings").is_visible():
        page.click("#settings-button")
    page.fill("[name=max_tokens]", str(tokens))
    page.fill("[name=temperature]", "0")
    if page.viewport_size == PHONE:
        page.click("#settings-button")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.locator("#send").wait_for(timeout=300_000)


def shoot(page: Page, name: str, at: str = "h1") -> None:
    """Write a screenshot of the visible page in 256 colours, with the pointer at the element `at`."""
    page.locator(at).first.hover()
    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)
    print(f"{name}.png: {(IMAGES / f'{name}.png').stat().st_size // 1000} kB")


def desktop(browser: Browser) -> None:
    """Two conversations, the second one formatted; marked tokens with the chart; side by side."""
    page = browser.new_page(viewport=DESKTOP, color_scheme="light")
    page.goto(ADDRESS)
    ask(page, LIST)
    page.click("#new")
    ask(page, CODE)
    page.evaluate("() => scrollTo(0, 0)")
    shoot(page, "serve-page")
    page.check("#marks")
    page.locator(".numbers").click()
    page.evaluate("() => scrollTo(0, 1e6)")
    shoot(page, "serve-tokens")
    page.click("#new")
    page.check("[name=compare]")
    page.click("#chats-button")
    ask(page, "Count: one, two, three, one, two, three, one, two", 96)
    shoot(page, "serve-side-by-side", at=".correction:not(.legend *, .origins *)")


def dark(browser: Browser) -> None:
    """The dark theme."""
    page = browser.new_page(viewport=DESKTOP, color_scheme="dark")
    page.goto(ADDRESS)
    ask(page, LIST)
    shoot(page, "serve-dark")


def phone(browser: Browser) -> None:
    """A phone."""
    page = browser.new_page(viewport=PHONE, color_scheme="light", has_touch=True, is_mobile=True)
    page.goto(ADDRESS)
    ask(page, CODE)
    page.evaluate("() => scrollTo(0, 0)")
    shoot(page, "serve-phone")


def main() -> None:
    """Serve the demo model and take every screenshot."""
    command = [sys.executable, "-m", "paceline", "serve", "--model", "demo", "--port", str(PORT), "--quiet"]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{ADDRESS}health")
                break
            except OSError:
                time.sleep(0.2)
        with sync_playwright() as playwright:
            options = ["--no-sandbox", "--disable-dev-shm-usage"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
            for take in (desktop, dark, phone):
                take(browser)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
