"""Pictures of the pages for the docs: `make screenshots` takes them in a real Chromium; the fleet is one that is told here."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from playwright.sync_api import Browser, expect

from aggregator.store import Store
from tests.browser.chromium import chromium
from tests.browser.fleet_server import serving
from tests.browser.fleets import HALL_MOVED, tell_hall
from tests.golden import ROOT
from tests.guest_agent.pages import dashboard_page

IMAGES = ROOT / "docs/images"
# File, page, width, colour scheme.
PICTURES = (
    ("dashboard.png", dashboard_page, 960, "light"),
    ("dashboard-phone-dark.png", dashboard_page, 360, "dark"),
)
# File, what the URL asks, width and height, colour scheme.
FLEET_PICTURES = (
    ("overview.png", "", (1280, 1130), "light"),
    ("overview-dark.png", "", (1280, 1130), "dark"),
    ("overview-phone-dark.png", "", (360, 1100), "dark"),
    ("card-dark.png", f"?view=card&uuid={HALL_MOVED}", (1280, 1170), "dark"),
    ("report.png", "?view=reports&report=utilization&since=24h&by=cvm", (1280, 620), "light"),
)


def main() -> int:
    path = shutil.which("chromium")
    if path is None:
        print("error: chromium is not installed", file=sys.stderr)
        return 1
    with chromium(path) as browser:
        for name, make, width, scheme in PICTURES:
            context = browser.new_context(
                viewport={"width": width, "height": 600}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page = context.new_page()
            page.set_content(make())
            page.screenshot(path=IMAGES / name, full_page=True)
            context.close()
            print(f"docs/images/{name}")
        take_fleet(browser)
    return 0


def take_fleet(browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/history.db"
        with closing(Store(database, max_lag_s=0)) as store:
            store.require_current()
            tell_hall(store, time.time_ns() // 1_000_000)
        with serving(database, Path(folder) / "spool") as fleet:
            for name, asked, (width, height), scheme in FLEET_PICTURES:
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
                )
                page = context.new_page()
                page.goto(fleet.url + asked)
                expect(page.locator("#fresh")).to_contain_text("as of")
                if "view=card" in asked:
                    page.locator(".chart svg").first.hover(position={"x": 455, "y": 60})
                page.screenshot(path=IMAGES / name)
                context.close()
                print(f"docs/images/{name}")


if __name__ == "__main__":
    sys.exit(main())
