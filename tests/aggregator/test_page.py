"""The page: what a value looks like, and that nothing a guest says can become markup."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aggregator.page import SHOWN_AT_FIRST, STATIC, cc, figures, render_fleet, render_shell
from gpuwire.device import GAUGES
from gpuwire.display import age, celsius, gib, percent, watts, yes_no

NOW_MS = 1_800_000_000_000

CARD: dict[str, Any] = {
    **dict.fromkeys(("vmm", "vm_id", "vm_name", "app_id", "instance_id", "uuid", "pci_bus_id", "bdf"), "x"),
    **dict.fromkeys(("host_bdf", "host_bdf_source", "sampled_at", "model"), None),
    **dict.fromkeys((g.name for g in GAUGES), None),
    **{"gpu_index": 0, "sampled_at_ms": NOW_MS, "polled_at_ms": NOW_MS, "query_errors": 0},
    **{"cc_enabled": None, "cc_ready": None, "state": "ok"},
}
CVM: dict[str, Any] = {
    **dict.fromkeys(("vmm", "vm_id", "vm_name", "app_id", "instance_id"), "x"),
    **{"outcome": "ok", "detail": None, "schema_status": None, "cc_enabled": None, "cc_ready": None},
    **{"since_ms": NOW_MS, "until_ms": NOW_MS, "gpus": 1},
}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(0), "0 %"),
        (percent(None), "–"),
        (gib(150754820096), "140.4 GiB"),
        (gib(0), "0.0 GiB"),
        (gib(None), "–"),
        (celsius(0), "0 °C"),
        (watts(70123), "70.1 W"),
        (watts(None), "–"),
        (age(NOW_MS - 4999, NOW_MS), "4 s"),
        (age(NOW_MS - 61_000, NOW_MS), "1 min"),
        (age(NOW_MS - 3 * 3600_000, NOW_MS), "3 h"),
        (age(NOW_MS - 49 * 3600_000, NOW_MS), "2 d"),
        (age(NOW_MS + 5000, NOW_MS), "0 s"),
        (age(None, NOW_MS), "–"),
        (yes_no(None), "unknown"),
        (yes_no(False), "no"),
        (cc({"cc_enabled": True, "cc_ready": True}), "ready"),
        (cc({"cc_enabled": True, "cc_ready": False}), "not ready"),
        (cc({"cc_enabled": None, "cc_ready": False}), "not ready"),
        (cc({"cc_enabled": False, "cc_ready": False}), "off"),
        (cc({"cc_enabled": True, "cc_ready": None}), "on"),
        (cc({"cc_enabled": None, "cc_ready": None}), "–"),
    ],
)
def test_values_look_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_an_empty_fleet_says_so() -> None:
    page = render_fleet([], [], now_ms=NOW_MS)
    assert "No card has been seen yet." in page
    assert "No CVM has been polled yet." in page


def test_absent_is_shown_as_absent_and_never_as_zero() -> None:
    page = render_fleet([CARD], [CVM], now_ms=NOW_MS)
    assert "0 %" not in page
    assert "<meter" not in page


def test_hostile_names_stay_text() -> None:
    hostile = "<script>alert(1)</script>\"'&"
    text_columns = [name for name, value in CARD.items() if value == "x" or name in ("host_bdf", "host_bdf_source", "state")]
    page = render_fleet(
        [{**CARD, **dict.fromkeys(text_columns, hostile)}],
        [{**CVM, **dict.fromkeys([n for n, v in CVM.items() if v in ("x", None, "ok")], hostile)}],
        now_ms=NOW_MS,
        notice=hostile,
        database_error=hostile,
        vmms_away={hostile: hostile},
    )
    assert page.count("<script") == 1, "our own"
    assert page.count("&lt;script&gt;") >= 10


def test_figures_count_each_card_as_what_it_is() -> None:
    def card(state: str, utilization: int | None, cc_ready: bool | None = True) -> dict[str, Any]:
        return {**CARD, "state": state, "utilization_gpu": utilization, "cc_ready": cc_ready}

    cards = [card("ok", 6), card("ok", 5), card("ok", 0, False), card("ok", None), card("stale", 90), card("silent", 90)]
    cards += [card("contested", 1), card("detached", 90, False)]
    found = {name: count for name, count, _ in figures(cards)}
    assert found == {
        "cards": 7,
        "busy": 1,
        "idle": 2,
        "stale": 1,
        "silent": 1,
        "detached": 1,
        "CC not ready": 1,
        "contested": 1,
    }
    troubled = [name for name, _, trouble in figures(cards) if trouble]
    assert troubled == ["stale", "silent", "detached", "CC not ready", "contested"]
    assert not any(trouble for _, _, trouble in figures([card("ok", 50)]))


def test_cards_in_trouble_are_among_the_first() -> None:
    fine = [{**CARD, "uuid": f"GPU-{number}"} for number in range(SHOWN_AT_FIRST)]
    last = [{**CARD, "uuid": "GPU-mute", "state": "silent"}, {**CARD, "uuid": "GPU-gone", "state": "detached"}]
    page = render_fleet([*fine, *last], [CVM], now_ms=NOW_MS)
    assert page.index("GPU-gone") < page.index("GPU-mute") < page.index("GPU-0")


def test_silent_cards_of_a_cvm_that_its_vmm_stopped_are_no_trouble_and_last() -> None:
    stopped, other = {**CARD, "vm_id": "stopped", "state": "silent", "uuid": "GPU-off"}, {**CARD, "uuid": "GPU-on"}
    cvms = [{**CVM, "vm_id": "stopped", "outcome": "not_running"}, CVM]
    page = render_fleet([stopped, other], cvms, now_ms=NOW_MS)
    assert "<b>0</b><span>silent</span>" in page
    assert page.index("GPU-on") < page.index("GPU-off")
    assert '<span class="neutral">stopped</span>' in page
    assert '<span class="neutral">not_running</span>' in page
    assert "not-ok" not in page
    elsewhere = render_fleet([stopped, other], [{**cvms[0], "app_id": "of an id before"}, CVM], now_ms=NOW_MS)
    assert "<b>1</b><span>silent</span>" in elsewhere


def test_a_card_that_is_missed_for_a_day_is_named_no_more() -> None:
    day_ms = 86_400_000
    missed = [
        {**CARD, "uuid": f"GPU-{state}-{age_ms}", "state": state, "sampled_at_ms": NOW_MS - age_ms}
        for state in ("detached", "silent")
        for age_ms in (day_ms, day_ms + 1)
    ]
    page = render_fleet([CARD, *missed], [CVM], now_ms=NOW_MS)
    assert f"GPU-detached-{day_ms + 1}" not in page
    assert all(card["uuid"] in page for card in missed if card["uuid"] != f"GPU-detached-{day_ms + 1}")
    assert "<b>1</b><span>detached</span>" in page


def test_cvms_in_trouble_come_first_and_those_that_do_not_run_last_the_newest_of_them_first() -> None:
    outcomes = ["not_running", "not_running", "ok", "timeout", "no_gpu", "vmm_unreachable"]
    cvms = [
        {**CVM, "vm_name": f"{outcome} {number}.", "outcome": outcome, "since_ms": NOW_MS + number}
        for number, outcome in enumerate(outcomes)
    ]
    page = render_fleet([CARD], cvms, now_ms=NOW_MS)
    assert re.findall(r"\w+ \d(?=\.)", page) == [
        *("vmm_unreachable 5", "timeout 3", "ok 2", "no_gpu 4", "not_running 1", "not_running 0")
    ]
    many = [{**cvms[0], "vm_id": f"off-{number}"} for number in range(SHOWN_AT_FIRST)]
    assert "timeout 3." in render_fleet([CARD], [*many, cvms[3]], now_ms=NOW_MS)


@pytest.mark.parametrize("state", ["silent", "stale", "detached"])
def test_a_value_of_before_is_shown_as_one_of_before(state: str) -> None:
    old = {**CARD, "state": state, "utilization_gpu": 70, "sampled_at_ms": NOW_MS - 300_000}
    page = render_fleet([old, {**CARD, "utilization_gpu": 60}], [CVM], now_ms=NOW_MS)
    assert page.count('<tr class="past">') == 1
    assert ">70 %, 5 min ago<" in page
    assert ">60 %<" in page


def test_the_first_view_has_as_many_rows_as_one_looks_at_and_cvms_in_trouble_first() -> None:
    cvms = [{**CVM, "vm_name": f"fine-{number}"} for number in range(500)] + [{**CVM, "vm_name": "bad", "outcome": "timeout"}]
    page = render_fleet([{**CARD, "uuid": f"GPU-{number}"} for number in range(1000)], cvms, now_ms=NOW_MS)
    assert f"{SHOWN_AT_FIRST} of 1000 cards" in page
    assert page.count("<tr>\n<td>") == 2 * SHOWN_AT_FIRST
    assert page.index("bad") < page.index("fine-0")
    assert len(page.encode()) < 200_000


def test_nothing_of_the_page_is_from_elsewhere_or_inline() -> None:
    pages = [render_fleet([CARD], [CVM], now_ms=NOW_MS), render_shell(notice="x", database_error="gone")]
    for text in [*pages, *(file.plain.decode() for file in STATIC.by_name.values())]:
        assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:|//)""", text)
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    for page in pages:
        assert not re.findall(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", page)
        assert not re.findall(r"""(?:src|href)="/""", page), "it would not work behind a path prefix"


def test_a_vmm_that_is_away_is_said_with_the_reason() -> None:
    page = render_fleet([], [], now_ms=NOW_MS, vmms_away={"rack1": "unreachable: no such file"})
    assert "VMM rack1 cannot be reached. unreachable: no such file" in page
    assert "cannot be reached" not in render_fleet([], [], now_ms=NOW_MS)


def test_a_database_that_is_away_is_said() -> None:
    assert "The database is away" in render_fleet([CARD], [CVM], now_ms=NOW_MS, database_error="database: gone")
    assert "The database is away" not in render_fleet([CARD], [CVM], now_ms=NOW_MS)
