"""Pictures of the pages for the docs: `make screenshots` takes them in a real Chromium."""

from __future__ import annotations

import shutil
import sys

from tests.browser.chromium import chromium
from tests.golden import ROOT
from tests.guest_agent.pages import dashboard_page

IMAGES = ROOT / "docs/images"
# File, page, width, colour scheme.
PICTURES = (
    ("dashboard.png", dashboard_page, 960, "light"),
    ("dashboard-phone-dark.png", dashboard_page, 360, "dark"),
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
