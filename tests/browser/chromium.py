"""A real Chromium, driven by Playwright: the one that the system has, none is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Route, expect, sync_playwright

# It runs as root in CI, and has no business anywhere but at the page that it is shown.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
# Others may use the machine meanwhile.
expect.set_options(timeout=20_000)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Requests:
    """Refuses and notes whatever a page asks for beside itself."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    def refuse(self, route: Route) -> None:
        self.urls.append(route.request.url)
        route.abort()
