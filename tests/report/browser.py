"""A page in headless Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: what a busy machine may take, in milliseconds
PATIENCE = 600_000
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    """Open a page, wait until its charts are drawn, and see that it says nothing on the console and loads nothing.

    Skips without a browser.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as tool:
        if found is None and not Path(tool.chromium.executable_path).exists():
            pytest.skip("no Chromium here")
        browser = tool.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=PATIENCE)
        try:
            page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
            page.set_default_timeout(PATIENCE)
            said: list[str] = []
            asked: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.absolute().as_uri())
            page.evaluate("window.drawn.then(() => true)")
            yield page
            assert not said
            assert [url for url in asked if not url.startswith("data:")] == [path.absolute().as_uri()]
        finally:
            browser.close()
