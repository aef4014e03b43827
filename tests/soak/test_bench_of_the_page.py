"""The bench of the page starts Chromium, two programs and a PostgreSQL: too much for each test run."""

from __future__ import annotations

import re

import pytest

from bench import fleet_page
from tests.browser.chromium import chromium
from tests.needs import program_or_skip

pytestmark = pytest.mark.soak


def test_fleet_page_puts_larger_fleets_beside_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    with chromium(program_or_skip("chromium")) as browser:
        fleet_page.on_postgresql(browser, [4, 8], 1)
    page = capsys.readouterr().out

    for name in fleet_page.FIGURES:
        assert re.search(rf"^  {name} +[0-9]+ +[0-9]+ +[0-9.]+$", page, re.MULTILINE), page
    assert len(re.findall(r"goal: 8 cards.*: [0-9]+, (?:met|MISSED)", page)) == 5, page
