"""The agent's dashboard in a real browser: on a phone, in the dark, without JavaScript, with nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser.chromium import Requests, chromium
from tests.guest_agent.pages import dashboard_page
from tests.needs import program_or_skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(program_or_skip("chromium")) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 2560])
def test_the_page_fits_and_follows_the_scheme(browser: Browser, width: int, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        java_script_enabled=False,
    )
    page, asked = context.new_page(), Requests()
    page.route("**", asked.refuse)
    page.set_content(dashboard_page())

    body = page.locator("body").bounding_box()
    assert body is not None
    assert body["x"] >= 0
    assert body["x"] + body["width"] <= width
    for card in page.locator(".card").all():
        box = card.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width
    assert page.get_by_text("70.1 W").count() == 1
    assert asked.urls == []
    context.close()


def test_dark_is_dark_and_light_is_light(browser: Browser) -> None:
    def text_colour(scheme: str) -> tuple[int, ...]:
        context = browser.new_context(viewport={"width": 400, "height": 400}, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        page.set_content(dashboard_page())
        # What is drawn, not what is declared: the page leaves the canvas to the browser's own scheme.
        colour = page.evaluate("getComputedStyle(document.body).color")
        context.close()
        return tuple(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    assert sum(text_colour("dark")) > 600, "light text"
    assert sum(text_colour("light")) < 150, "dark text"
