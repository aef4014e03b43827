"""The fleet's page in a real browser, as `gpu-aggregator serve` has it: each view, on a phone and on a wall, by keyboard, with
a token, behind a prefix, with nobody there."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from aggregator.rows import Poll
from aggregator.store import Store
from tests.browser.chromium import chromium
from tests.browser.fleet_server import Fleet, behind_prefix, in_thread, serving
from tests.browser.fleets import BROKEN, HOSTILE, MOVED, SERVING, TRAINING, H, M, tell_large, tell_small, uuid
from tests.needs import program_or_skip
from tests.postgres import PostgresServer

CARD = f"?view=card&uuid={MOVED}"
SLOT = "?view=slot&vmm=rack2&host_bdf=0000:50:00.0"
CVM = "?view=cvm&vmm=rack2&vm_id=vm-evaluation&range=24h"
REPORT = "?view=reports&report=utilization&by=day&since=7d"
VIEWS = ["", CARD, SLOT, CVM, REPORT]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(program_or_skip("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('small')}/history.db"
    fill(url, tell_small)
    return url


@pytest.fixture(scope="module")
def fleet(browser: Browser, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:  # noqa: ARG001
    with serving(database, tmp_path_factory.mktemp("spool") / "spool") as found:
        yield found


def fill(url: str, tell: Callable[[Store, int], None]) -> None:
    store = Store(url, max_lag_s=0)
    store.require_current()
    tell(store, time.time_ns() // 1_000_000)
    store.close()


class Watched:
    """A tab, and what went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.urls: list[str] = []
        self.problems: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))

    def open(self, url: str) -> Page:
        self.page.goto(url)
        return settled(self.page)


@contextmanager
def tab(browser: Browser, width: int = 1280, scheme: str = "light", *, sound: bool = True) -> Iterator[Watched]:
    """`sound`: it asks nobody else, and nothing in it goes wrong."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        timezone_id="Asia/Kolkata",
    )
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    try:
        yield watched
        if sound:
            assert watched.problems == []
            assert {re.sub(r"(//[^/]+/).*", r"\1", url) for url in watched.urls if not url.startswith("blob:")} == {
                re.sub(r"(//[^/]+/).*", r"\1", watched.urls[0])
            }
    finally:
        context.close()


def settled(page: Page) -> Page:
    expect(page.locator("#fresh")).to_contain_text("as of")
    return page


def renew(page: Page) -> None:
    """What a tab does that comes to the front: as the timer does, and at once."""
    page.evaluate("document.querySelector('#fresh').textContent = ''; document.dispatchEvent(new Event('visibilitychange'))")


def column(page: Page, name: str) -> list[str]:
    heads = [head.strip() for head in page.locator("[aria-label=Cards] thead th").all_inner_texts()]
    number = heads.index(name) + 1
    return [text.strip() for text in page.locator(f"[aria-label=Cards] tbody td:nth-child({number})").all_inner_texts()]


# Sizes and schemes


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark"), (2560, "light")])
def test_every_view_fits_and_follows_the_scheme(browser: Browser, fleet: Fleet, width: int, scheme: str) -> None:
    with tab(browser, width, scheme) as watched:
        for view in VIEWS:
            page = watched.open(fleet.url + view)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            ink, ground = page.evaluate(
                "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
            )
            bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, ground)]
            dark, light = bright if scheme == "light" else reversed(bright)
            assert dark < 150
            assert light > 600
            for svg in page.locator(".chart svg, .strip svg").all():
                box = svg.bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
                assert svg.locator("text").count() > 1, "an axis has its figures"


def test_texts_of_an_axis_do_not_lie_over_one_another(browser: Browser, fleet: Fleet) -> None:
    for width in (360, 1280):
        with tab(browser, width) as watched:
            page = watched.open(f"{fleet.url}{CARD}&range=6h")
            for svg in page.locator(".chart svg").all():
                boxes = [text.bounding_box() for text in svg.locator("text").all()]
                for number, one in enumerate(boxes):
                    for other in boxes[number + 1 :]:
                        assert one is not None
                        assert other is not None
                        apart_x = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
                        apart_y = one["y"] + one["height"] <= other["y"] + 2 or other["y"] + other["height"] <= one["y"] + 2
                        assert apart_x or apart_y, (one, other)


# The overview


def test_figures_count_and_choose_cards(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        figures = dict(reversed(text.split("\n")) for text in page.locator(".figures button").all_inner_texts())
        assert (figures["cards"], figures["silent"], figures["CC not ready"]) == ("15", "2", "2")
        assert int(figures["busy"]) + int(figures["idle"]) == 13
        page.get_by_role("button", name="silent").click()
        assert page.url.endswith("?state=silent")
        assert set(column(page, "State")) == {"○ silent"}
        settled(page.reload() and page)
        assert set(column(page, "State")) == {"○ silent"}, "what is in the URL stays"
        page.get_by_role("button", name="cards").click()
        assert page.url == fleet.url
        assert len(column(page, "State")) == 15


def test_cards_are_found_and_sorted_and_the_url_keeps_it(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        page.get_by_label("Find").fill("rack1 serv")
        expect(page.get_by_text("3 cards", exact=True)).to_be_visible()
        assert set(column(page, "CVM")) == {"serving"}
        page.get_by_label("Find").fill("")
        page.get_by_role("combobox", name="Host").select_option("rack2")
        assert set(column(page, "Host")) == {"rack2"}
        page.get_by_role("button", name="Utilization").click()
        page.get_by_role("button", name="Utilization").click()
        shown = [int(text.split()[0]) for text in column(page, "Utilization")]
        assert shown == sorted(shown, reverse=True) != sorted(shown)
        assert page.locator("th[aria-sort=descending]").inner_text() == "Utilization"
        assert page.url.endswith("?host=rack2&sort=-utilization")
        settled(page.reload() and page)
        assert [int(text.split()[0]) for text in column(page, "Utilization")] == shown
        page.get_by_label("Find").fill("no such card")
        expect(page.get_by_text("No card is like that")).to_be_visible()


def test_the_heat_map_shows_what_was_and_is_walked_by_keys(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?q=serving")
        canvas = page.locator(".heat-scroll canvas")
        canvas.focus()
        page.keyboard.press("ArrowDown")
        said = page.locator(".heat output")
        expect(said).to_contain_text("rack1 · serving · 0000:30:00.0")
        texts = []
        for _ in range(60):
            page.keyboard.press("ArrowLeft")
            texts.append(said.inner_text())
        assert any(text.endswith(": no data") for text in texts), "the three hours of silence"
        assert any(re.search(r": \d+ %$", text) for text in texts)
        # Drawn, and in the colours of the legend: the pixels of the row are many, those beside it the panel's.
        colours = canvas.evaluate(
            "canvas => { const pen = canvas.getContext('2d'), found = new Set();"
            " for (let x = 200; x < canvas.width; x += 4) found.add(String(pen.getImageData(x, 48, 1, 1).data));"
            " return found.size }"
        )
        assert colours > 10
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=re.compile("^Card GPU-"))).to_be_visible()
        page.go_back()
        expect(page.get_by_label("Find")).to_have_value("serving")


def test_it_renews_itself_without_a_flicker(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?host=rack1")
        asked = len(watched.urls)
        link = page.locator("[aria-label=Cards] tbody a").first
        link.focus()
        page.evaluate("window.scrollTo(0, 300)")
        page.evaluate(
            """window.was = scrollY;
            window.before = [document.activeElement, ...document.querySelectorAll('tbody tr, canvas, h2')];
            window.changes = 0;
            const rebuilt = (one) => one.removedNodes.length && one.target.matches?.('tbody, table, section, main');
            new MutationObserver((all) => { window.changes += all.filter(rebuilt).length; })
              .observe(document.body, {childList: true, subtree: true});"""
        )
        renew(page)
        settled(page)
        assert page.evaluate("window.before.every((element) => element.isConnected)")
        assert page.evaluate("[document.activeElement === window.before[0], scrollY === window.was, window.changes]") == [
            True,
            True,
            0,
        ]
        heat = [url for url in watched.urls[asked:] if "heatmap" in url]
        assert len(heat) == 1
        assert "start=" in heat[0], "of the newest part only"
        assert len(page.locator(".figures b").all()) == 8


def test_a_new_sample_shows_up_by_itself(browser: Browser, database: str, tmp_path: Path) -> None:
    copy = tmp_path / "history.db"
    copy.write_bytes(Path(database.removeprefix("sqlite:///")).read_bytes())
    with serving(f"sqlite:///{copy}", tmp_path / "spool") as own, tab(browser) as watched:
        page = watched.open(f"{own.url}?q={uuid(0)}")
        with own.store.maintaining() as connection:
            connection.exec_driver_sql("UPDATE gpu_latest SET temperature_c = 99")
        renew(page)
        expect(page.locator("[aria-label=Cards] tbody")).to_contain_text("99 °C")
        own.metrics.vmms_away["rack9"] = "unreachable: <b>nobody</b>"
        renew(page)
        expect(page.locator("#notices")).to_have_text("VMM rack9 cannot be reached. unreachable: <b>nobody</b>")


def test_what_is_in_trouble_comes_first(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        assert column(page, "State") == ["○ silent"] * 2 + ["● ok"] * 13
        assert page.locator("[aria-label=CVMs] tbody td").first.inner_text() == "▲ timeout"
        assert page.locator(".figures .trouble").all_inner_texts() == ["2\nsilent", "2\nCC not ready"]


def test_cards_that_fell_off_are_trouble_and_those_of_a_stopped_cvm_are_none(
    browser: Browser, database: str, tmp_path: Path
) -> None:
    copy = tmp_path / "history.db"
    copy.write_bytes(Path(database.removeprefix("sqlite:///")).read_bytes())
    url = f"sqlite:///{copy}"
    fill(url, lambda store, now_ms: store.write([Poll(TRAINING, now_ms, "no_gpu"), Poll(SERVING, now_ms, "not_running")]))
    with serving(url, tmp_path / "spool") as own, tab(browser) as watched:
        page = watched.open(own.url)
        states = ["◇ detached"] * 4 + ["○ silent"] * 2 + ["● ok"] * 6 + ["□ stopped"] * 3
        assert column(page, "State") == states
        assert page.locator(".figures .trouble").all_inner_texts() == ["2\nsilent", "4\ndetached", "2\nCC not ready"]
        for state, value in zip(states, column(page, "Utilization"), strict=True):
            assert re.fullmatch(r"\d+ %" if state == "● ok" else r"\d+ %, \d+ (s|min|h) ago", value)
        assert page.locator("[aria-label=Cards] tbody meter").count() == 6
        colour = "element => getComputedStyle(element).color"
        numbers = page.locator("[aria-label=Cards] tbody td.n:nth-child(3)")
        assert numbers.first.evaluate(colour) != numbers.nth(6).evaluate(colour)
        outcomes = page.locator("[aria-label=CVMs] tbody td:first-child").all_inner_texts()
        assert (outcomes[0], outcomes[-1]) == ("▲ timeout", "□ not_running")
        assert set(outcomes[1:-1]) == {"● ok", "● no_gpu"}
        page.get_by_role("button", name="detached").click()
        assert set(column(page, "State")) == {"◇ detached"}
        page.get_by_role("combobox", name="State").select_option("stopped")
        assert column(page, "CVM") == ["serving"] * 3
        page.locator("[aria-label=Cards] tbody a").first.click()
        expect(page.locator(".tiles.past")).to_contain_text("□ stopped")
        page.get_by_role("link", name="serving").first.click()
        expect(page.locator("[aria-label=Cards] .past .neutral")).to_have_count(3)
        expect(page.locator(".strip")).to_contain_text("not_running")
        assert page.locator(".not-ok, .strip .trouble").count() == 0

        with own.store.maintaining() as connection:
            connection.exec_driver_sql(
                "UPDATE gpu_latest SET sampled_at_ms = sampled_at_ms - 86400000"
                " WHERE gpu_id = (SELECT min(gpu_id) FROM v_gpu_latest JOIN gpu USING (uuid) WHERE state = 'detached')"
            )
        page.goto(own.url)
        assert column(page, "State") == states[1:], "missed for a day"
        assert page.locator(".figures .trouble").all_inner_texts() == ["2\nsilent", "3\ndetached", "2\nCC not ready"]


def test_what_is_old_is_said_to_be_while_an_answer_hangs_and_the_next_question_follows_within_a_minute(
    browser: Browser, fleet: Fleet
) -> None:
    with tab(browser) as watched:
        page = watched.page
        page.clock.install()
        watched.open(fleet.url)
        fresh = page.locator("#fresh")
        before = fresh.inner_text()
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/heatmap*", hold)
        with page.expect_request("**/heatmap*"), page.expect_response("**/notices"):
            page.clock.run_for(16_000)
        expect(fresh).to_have_text(before)
        with page.expect_response("**/notices"):
            page.clock.run_for(16_000)
        expect(fresh).to_have_text(f"{before}, old")
        expect(fresh).to_have_class(re.compile("old"))
        assert len(held) == 1
        held[0].continue_()
        expect(fresh).not_to_contain_text("old")
        expect(fresh).not_to_have_class(re.compile("old"))
        page.unroute("**/heatmap*")
        with page.expect_request("**/heatmap*"):
            page.clock.run_for(61_000)


def test_nothing_jumps_when_the_rest_of_the_first_view_comes(browser: Browser, fleet: Fleet) -> None:
    with tab(browser, sound=False) as before, tab(browser) as after:
        before.page.route("**/app.js", lambda route: route.abort())
        before.page.goto(fleet.url)
        after.open(fleet.url)
        for place in (".figures", "#heat", "#cards", "[aria-label=Cards] tbody tr"):
            boxes = [one.page.locator(place).first.bounding_box() for one in (before, after)]
            tops = [box["y"] for box in boxes if box is not None]
            assert len(tops) == 2
            assert abs(tops[0] - tops[1]) <= 4, place


def test_a_cell_of_the_heat_map_is_told_beside_it_and_nothing_moves(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        before = page.locator("#cards").bounding_box()
        canvas = page.locator(".heat-scroll canvas")
        canvas.hover(position={"x": 700, "y": 50})
        expect(page.locator(".heat output")).to_have_text(re.compile(r"^rack1 · serving · .* · \d+ \w+ [\d:]+–[\d:]+: \d+ %$"))
        assert page.locator("#cards").bounding_box() == before
        page.mouse.move(5, 5)
        expect(page.locator(".heat output")).to_be_hidden()


# A card, a slot, a CVM


def test_a_card_has_its_history_with_gaps_its_stays_and_its_errors(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?view=card&uuid={uuid(4)}&range=24h")
        assert page.locator(".chart").count() == 4
        expect(page.get_by_text("A point is 5 min, from")).to_be_visible()
        lines = page.locator(".chart").first.locator(".average").all()
        assert len(lines) == 2, "a gap of three hours is a gap"
        left, right = (line.bounding_box() for line in lines)
        assert left is not None
        assert right is not None
        width = page.locator(".chart svg").first.evaluate("svg => svg.clientWidth - 66")
        assert 2.5 < (right["x"] - left["x"] - left["width"]) / width * 24 < 3.5, "hours"
        assert page.locator(".chart").first.locator(".band").count() == 2
        watched.open(fleet.url + CARD)
        assert page.locator(".strip .segment-name").all_text_contents() == ["batch", "evaluation"]
        expect(page.locator("[aria-label=Tenancy] table")).to_contain_text("evaluation")
        expect(page.get_by_text("silent")).to_be_visible()
        watched.open(f"{fleet.url}?view=card&uuid={BROKEN}")
        expect(page.get_by_role("region", name="Errors", exact=True)).to_contain_text("power: Not Supported")


def test_a_drag_zooms_a_button_goes_back_and_the_url_has_it(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?view=card&uuid={uuid(0)}&range=24h")
        box = page.locator(".chart svg").first.bounding_box()
        assert box is not None
        y = box["y"] + 50
        page.mouse.move(box["x"] + box["width"] * 0.5, y)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.55, y, steps=3)
        assert page.locator(".drag").count() == 1
        page.mouse.up()
        expect(page.get_by_text("A point is 15 s, from samples")).to_be_visible()
        assert re.search(r"from=[^&]+Z&to=[^&]+Z", page.url)
        assert "range" not in page.url
        zoomed = page.url
        page.get_by_role("link", name="zoom out").click()
        expect(page.locator(".ranges")).to_be_visible()
        page.go_back()
        expect(page.get_by_text("A point is 15 s, from samples")).to_be_visible()
        assert page.url == zoomed
        page.get_by_role("link", name="7d", exact=True).click()
        expect(page.get_by_text(re.compile(r"A point is \d+ min, from buckets of 5 minutes"))).to_be_visible()
        assert page.url.endswith("range=7d")
        for name in ("1h", "1y"):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator(f".ranges [aria-current]:text-is('{name}')")).to_be_visible()
            settled(page)


def test_a_chart_is_read_and_zoomed_by_keys(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?view=card&uuid={uuid(0)}&range=24h")
        page.locator(".chart svg").nth(3).focus()
        said = page.get_by_role("status").filter(has_text="Power")
        page.keyboard.press("ArrowRight")
        value = r"%s, least %s, greatest %s"
        spoken = "; ".join(
            value.replace("%s", figure)
            for figure in (r"Power \d+\.\d W", r"Utilization \d+ %", r"Memory \d+\.\d GiB", r"Temperature \d+ °C")
        )
        spoken = re.sub(r"(least|greatest) [A-Z][a-z ]+ ", r"\1 ", spoken)
        expect(said).to_have_text(re.compile(rf"^\d+ \w+ \d\d:\d\d, 5 min: {spoken}$"))
        last = said.inner_text()
        page.keyboard.press("ArrowLeft")
        expect(said).not_to_have_text(last)
        assert len(set(page.locator(".tag-text").all_text_contents())) == 1, "one instant"
        assert page.locator(".cross").count() == 4
        page.keyboard.press("Home")
        left = page.locator(".cross").first.bounding_box()
        page.keyboard.press("End")
        right = page.locator(".cross").first.bounding_box()
        assert left is not None
        assert right is not None
        assert right["x"] - left["x"] > 400
        page.keyboard.press("Escape")
        expect(page.locator(".cross")).to_have_count(0)
        page.keyboard.press("+")
        expect(page).to_have_url(re.compile("from="))


def test_a_pointer_reads_all_charts_at_one_instant_and_nothing_moves(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(f"{fleet.url}?view=card&uuid={uuid(4)}&range=24h")
        where = "[...document.querySelectorAll('h2, h3, .chart svg')].map((one) => JSON.stringify(one.getBoundingClientRect()))"
        before = page.evaluate(where)
        chart = page.locator(".chart svg").nth(1)
        box = chart.bounding_box()
        assert box is not None
        inner = box["width"] - 70

        def point(hours_ago: float) -> None:
            chart.hover(position={"x": 60 + inner * (1 - hours_ago / 24), "y": 60})

        point(4)
        expect(page.locator(".chart .read")).to_have_count(4)
        for text, unit in zip(page.locator(".chart .read").all_text_contents(), ("%", "GiB", "°C", "W"), strict=True):
            assert re.fullmatch(rf"average [\d.]+, [\d.]+ to [\d.]+ {unit}", text)
        [tag] = set(page.locator(".tag-text").all_text_contents())
        assert re.fullmatch(r"\d+ \w+ \d\d:\d\d, 5 min", tag)
        assert page.evaluate(where) == before
        assert page.locator("main output").text_content() == "", "a pointer is not read aloud"
        point(7.5)
        expect(page.locator(".chart .read")).to_have_text(["no data"] * 4)
        page.mouse.move(5, 5)
        expect(page.locator(".chart .read, .cross")).to_have_count(0)
        assert page.evaluate(where) == before


def test_a_slot_says_which_cards_sat_there(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url + SLOT)
        assert [name[:12] for name in page.locator(".strip .segment-name").all_text_contents()] == [MOVED[:12], uuid(14)[:12]]
        page.get_by_role("region", name="Cards that sat here").get_by_role("link").first.click()
        expect(page.get_by_role("heading", name=f"Card {uuid(14)}")).to_be_visible()


def test_a_cvm_has_its_cards_its_outcomes_and_its_schemas_verdict(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url + CVM)
        assert page.locator(".strip .segment-name").all_text_contents()[:1] == ["timeout"]
        assert "ok, CC not ready" in page.locator(".strip").inner_html()
        expect(page.get_by_role("region", name="Stretches")).to_contain_text("the VMM gave no answer within 10 s")
        assert page.get_by_role("region", name="Cards").locator("tbody tr").count() == 2
        watched.open(f"{fleet.url}?view=cvm&vmm=rack2&vm_id=vm-notebooks")
        expect(page.get_by_text("older: its agent speaks an older schema")).to_be_visible()


def test_a_card_that_is_not_there_is_said_not_to_be(browser: Browser, fleet: Fleet) -> None:
    with tab(browser, sound=False) as watched:
        watched.page.goto(f"{fleet.url}?view=card&uuid=GPU-abc")
        expect(watched.page.get_by_role("alert")).to_contain_text("no card GPU-abc is known")
        expect(watched.page.locator("#fresh")).to_have_text("")
        watched.page.get_by_role("link", name="Overview").click()
        expect(watched.page.get_by_label("Find")).to_be_visible()


# Reports


def test_a_report_has_its_table_its_chart_its_csv_and_its_sql(browser: Browser, fleet: Fleet, database: str) -> None:
    with tab(browser, sound=False) as watched:
        page = watched.open(f"{fleet.url}?view=reports")
        page.get_by_role("link", name="utilization").first.click()
        expect(page.get_by_role("heading", name="Report: utilization")).to_be_visible()
        page.get_by_role("combobox", name="by").select_option("day")
        page.get_by_label("since").select_option("7d")
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".chart .bar").first).to_be_visible()
        rows = page.locator("tbody tr").count()
        assert page.locator(".chart .bar").count() == rows
        with page.expect_download() as download:
            page.get_by_role("link", name="Download as CSV").click()
        assert download.value.url.endswith("/api/v1/reports/utilization?since=7d&by=day&format=csv")
        lines = Path(download.value.path()).read_text().splitlines()
        assert lines[0].startswith("day,cards,avg_pct,")
        assert len(lines) == rows + 1
        assert not [url for url in watched.urls if "format=sql" in url], "who does not look at it does not wait for it"
        page.get_by_text("SQL", exact=True).click()
        statement = page.get_by_role("region", name="SQL")
        expect(statement).to_contain_text("SELECT")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        page.context.grant_permissions(["clipboard-read"])
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_text("Copied.")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.strip() == (statement.text_content() or "").strip()
        with closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as connection:
            assert len(connection.execute(copied).fetchall()) == rows
        page.get_by_label("busy above").fill("7")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("alert")).to_contain_text("busy_above: '7' is not allowed")


def test_where_tokens_are_asked_for_the_csv_comes_with_one_and_the_sql_to_who_may(
    browser: Browser, database: str, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("everything-1\nonly-training read:app=7d5c1a9e-training\n")
    with serving(database, tmp_path / "spool", tokens=tmp_path / "tokens") as own, tab(browser, sound=False) as watched:
        page = watched.page
        page.goto(f"{own.url}?view=reports&report=placement&since=24h")
        page.get_by_label("Token").fill("only-training")
        page.keyboard.press("Enter")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(6)
        with page.expect_download() as download:
            page.get_by_role("link", name="Download as CSV").click()
        assert download.value.url.startswith("blob:")
        assert download.value.suggested_filename == "placement.csv"
        assert len(Path(download.value.path()).read_text().splitlines()) == 6 + 1
        page.get_by_text("SQL", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("format=sql is for who may read the whole database")
        expect(page.get_by_role("region", name="SQL")).to_be_hidden()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Token").fill("everything-1")
        page.keyboard.press("Enter")
        page.get_by_text("SQL", exact=True).click()
        expect(page.get_by_role("region", name="SQL")).to_contain_text("SELECT")
        assert not [url for url in watched.urls if "everything-1" in url or "only-training" in url]


# Hostile names


def test_hostile_names_stay_text_in_every_view(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        assert HOSTILE in column(page, "CVM")
        page.get_by_role("link", name=HOSTILE).first.click()
        expect(page.get_by_role("heading", name=f"CVM {HOSTILE}")).to_be_visible()
        page.get_by_role("region", name="Cards").get_by_role("link", name="GPU-").first.click()
        expect(page.locator("[aria-label=Tenancy]").get_by_role("link", name=HOSTILE).first).to_be_visible()
        watched.open(f"{fleet.url}?view=reports&report=placement&since=24h")
        assert page.locator("script").count() == 1
        assert page.locator("img").count() == 0
        assert "owned" not in page.title()


def test_hostile_words_in_the_url_stay_text(browser: Browser, fleet: Fleet) -> None:
    with tab(browser, sound=False) as watched:
        page = watched.page
        for target in (
            "?q=%3Cimg+src=x+onerror=alert(1)%3E",
            "?view=cvm&vm_id=%3Cimg+src=x+onerror=alert(1)%3E",
            "?view=card&uuid=..%2F..%2Fx",
        ):
            page.goto(fleet.url + target)
            expect(page.locator("main :is(h2, .error):visible").first).to_be_visible()
            assert page.locator("img").count() == 0
        assert not [problem for problem in watched.problems if "404" not in problem and "400" not in problem]


# Who may


def test_a_token_is_asked_for_kept_by_the_tab_and_never_in_a_url(browser: Browser, database: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("everything-1\nonly-training read:app=7d5c1a9e-training\n")
    with (
        serving(database, tmp_path / "spool", notice="for us only", tokens=tmp_path / "tokens") as own,
        tab(browser, sound=False) as watched,
    ):
        page = watched.page
        page.goto(own.url + "?sort=power")
        expect(page.get_by_label("Token")).to_be_focused()
        assert "for us only" not in page.content()
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This token is not known.")
        page.get_by_label("Token").fill("everything-1")
        page.keyboard.press("Enter")
        settled(page)
        assert len(column(page, "State")) == 15
        expect(page.locator("#notices")).to_have_text("for us only")
        settled(page.reload() and page)
        assert len(column(page, "State")) == 15
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_focused()
        assert page.locator("tbody").count() == 0
        page.get_by_label("Token").fill("only-training")
        page.keyboard.press("Enter")
        settled(page)
        assert set(column(page, "CVM")) == {"training", "evaluation"}
        assert "for us only" not in page.content()
        assert page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 1]
        assert not [url for url in watched.urls if "everything-1" in url or "only-training" in url]
        other = page.context.new_page()
        other.goto(own.url)
        expect(other.get_by_label("Token")).to_be_visible()


def test_it_works_behind_a_path_prefix(browser: Browser, fleet: Fleet) -> None:
    with in_thread(behind_prefix(lambda: fleet.url, "/ops/gpu")) as [proxy], tab(browser) as watched:
        page = watched.open(f"{proxy}/ops/gpu/")
        page.locator("[aria-label=Cards] tbody a").first.click()
        expect(page.locator(".chart").first).to_be_visible()
        page.get_by_role("link", name="Reports").click()
        expect(page.get_by_role("heading", name="Reports")).to_be_visible()
        page.get_by_role("link", name="Overview").click()
        settled(page)
        assert page.url == f"{proxy}/ops/gpu/"
        assert all(url.startswith((f"{proxy}/ops/gpu/", "data:")) for url in watched.urls)


# Nobody there


def test_an_aggregator_that_is_away_is_said_to_be_and_what_was_shown_stays(browser: Browser, fleet: Fleet) -> None:
    there = [fleet.url]
    with in_thread(behind_prefix(lambda: there[0], "/x")) as [proxy], tab(browser, sound=False) as watched:
        page = watched.open(f"{proxy}/x/")
        there[0] = "http://127.0.0.1:9/"
        renew(page)
        expect(page.get_by_role("alert")).to_contain_text("The aggregator does not answer. What is shown is as it was.")
        assert len(column(page, "State")) == 15
        there[0] = fleet.url
        expect(page.get_by_role("alert")).to_have_count(0)
        settled(page)


def test_a_database_that_is_away_is_said_to_be_and_that_it_is_back(browser: Browser, tmp_path: Path) -> None:
    with PostgresServer() as server:
        fill(server.url, lambda store, now_ms: tell_small(store, now_ms, hours=0.5))
        with serving(server.url, tmp_path / "spool") as own, tab(browser, sound=False) as watched:
            page = watched.open(own.url)
            server.stop()
            renew(page)
            expect(page.get_by_role("alert")).to_contain_text("The database is away; polling goes on")
            assert len(column(page, "State")) == 13
            page.reload()
            expect(page.get_by_role("alert")).to_contain_text("The database is away; polling goes on")
            server.start()
            settled(page)
            expect(page.get_by_role("alert")).to_have_count(0)
            assert len(column(page, "State")) == 13


def test_a_fleet_without_cards_says_so(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(f"sqlite:///{tmp_path}/history.db", tmp_path / "spool", notice="An empty one.") as own,
        tab(browser) as watched,
    ):
        page = watched.open(own.url)
        for words in ("No card has been seen yet.", "No CVM has been polled yet.", "An empty one."):
            expect(page.get_by_text(words)).to_be_visible()
        expect(page.locator(".heat")).to_be_hidden()


def test_without_javascript_there_is_what_the_server_knows(browser: Browser, fleet: Fleet) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(fleet.url)
    expect(page.get_by_text("15 of 15 cards")).to_be_visible()
    assert page.locator("[aria-label=Cards] tbody tr").count() == 15
    assert HOSTILE in page.locator("[aria-label=CVMs]").inner_text()
    assert "The heat map needs JavaScript." in page.locator("body").inner_text()
    expect(page.get_by_text("Loading…")).to_be_hidden()
    expect(page.locator(".heat-room")).to_be_hidden()
    page.goto(fleet.url + REPORT)
    assert "This view needs JavaScript" in page.locator("body").inner_text()
    expect(page.get_by_text("Loading…")).to_be_hidden()
    context.close()


# Large


def test_a_thousand_cards_weigh_little(browser: Browser, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/history.db"
    fill(url, lambda store, now_ms: tell_large(store, now_ms, 1000, 15 * M))
    with serving(url, tmp_path / "spool") as own, tab(browser) as watched:
        finished: list[Request] = []
        watched.page.on("requestfinished", lambda request: finished.append(request))  # noqa: PLW0108 (Playwright marks its handlers)
        with watched.page.expect_event("requestfinished", lambda request: "heatmap" in request.url):
            page = watched.open(own.url)
        expect(page.get_by_text("100 of 1000 cards")).to_be_visible()
        assert page.locator("tbody tr").count() <= 2 * 100
        assert page.locator(".heat-scroll canvas").count() == 1
        sizes = [request.sizes() for request in finished]
        weight = sum(size["responseBodySize"] + size["responseHeadersSize"] for size in sizes)
        assert 100_000 < weight < 300_000


def test_five_thousand_cards_stay_readable(browser: Browser, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/history.db"
    fill(url, lambda store, now_ms: tell_large(store, now_ms, 5000, H))
    with serving(url, tmp_path / "spool") as own, tab(browser) as watched:
        page = watched.open(own.url)
        expect(page.get_by_text("100 of 5000 cards")).to_be_visible()
        assert page.locator("tbody tr").count() <= 2 * 100
        canvas = page.locator(".heat-scroll canvas")
        assert canvas.evaluate("canvas => canvas.width * canvas.height") < 3_000_000, "no more than is in view"
        picture = "canvas => canvas.toDataURL()"
        top = canvas.evaluate(picture)
        page.locator(".heat-scroll").evaluate(
            "async (box) => { box.scrollTop = box.scrollHeight / 2;"
            " await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))); }"
        )
        assert canvas.evaluate(picture) != top
        canvas.focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".heat output")).to_have_text(re.compile(r"^rack0(38|39|40) · .*: (\d+ %|no data)$"))
        page.get_by_label("Find").fill("rack007")
        expect(page.get_by_text("64 cards", exact=True)).to_be_visible()
        expect(canvas).to_have_attribute("aria-label", "Heat map of utilization: 64 cards over the last day")
        page.get_by_label("Find").fill("")
        page.get_by_role("button", name="Show 400 more").click()
        expect(page.get_by_text("500 of 5000 cards")).to_be_visible()


# By ear and by keyboard


@pytest.mark.parametrize("view", VIEWS)
def test_everything_has_a_name_and_headings_are_in_order(browser: Browser, fleet: Fleet, view: str) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url + view)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, svg, canvas, [role=region], [tabindex="0"]')]
            .filter((element) => element.getAttribute('aria-hidden') !== 'true' && element.checkVisibility())
            .filter((element) => !(element.textContent.trim() && element.matches('button, a, summary, pre, code'))
              && !element.labels?.length && !element.getAttribute('aria-label') && !element.getAttribute('aria-labelledby'))
            .map((element) => element.outerHTML.slice(0, 120))"""
        )
        assert nameless == []
        levels = [
            int(tag[1]) for tag in page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((e) => e.tagName)")
        ]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        assert page.locator("main").count() == page.locator("header").count() == 1
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((element) => element.id)")
        assert len(ids) == len(set(ids))
        assert page.evaluate("document.documentElement.lang") == "en"
        for scope in page.locator("th").all()[:40]:
            assert scope.get_attribute("scope") == "col"


def test_focus_is_seen_and_follows_into_a_new_view(browser: Browser, fleet: Fleet) -> None:
    with tab(browser) as watched:
        page = watched.open(fleet.url)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="To the content")).to_be_in_viewport()
        for _ in range(25):
            page.keyboard.press("Tab")
            style = page.evaluate(
                "(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))"
            )
            assert style == ["solid", "2px"]
        page.locator("[aria-label=Cards] tbody a").first.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".chart").first).to_be_visible()
        expect(page.locator("main")).to_be_focused()


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser: Browser, fleet: Fleet, scheme: str) -> None:
    with tab(browser, scheme=scheme) as watched:
        page = watched.open(fleet.url)
        pairs = page.evaluate(
            """() => [...document.querySelectorAll('p, td, th, h2, a, button, label, .ok, .not-ok')].slice(0, 400)
            .filter((element) => element.checkVisibility()).map((element) => {
              let ground = element;
              const clear = () => getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)';
              while (ground.parentElement && clear()) ground = ground.parentElement;
              return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
            })"""
        )
        for ink, ground in {tuple(pair) for pair in pairs}:
            light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
