"""The dashboard: what it shows, how, to whom, and that nothing a card says becomes markup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.display import duration
from guest_agent.dashboard import Figures, load, render_dashboard, sample_age, short_pci_address, true_false
from tests.guest_agent.pages import GUEST, SNAPSHOT, SYSTEM, dashboard_page
from tests.guest_agent.test_metrics import snapshots


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (load(40), "0.40"),
        (load(1234), "12.34"),
        (duration(90061), "1d 1h 1m 1s"),
        (duration(86400), "1d 0h 0m 0s"),
        (duration(59), "59s"),
        (duration(0), "0s"),
        (sample_age(2512), "2.5 s"),
        (sample_age(None), "–"),
        (true_false(None), "unknown"),
        (true_false(True), "true"),
        (true_false(False), "false"),
    ],
)
def test_values_look_as_the_contract_says(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("as_nvml_gave_it", "shown"),
    [
        ("00000000:01:00.0", "01:00.0"),
        ("0000:d8:00.0", "d8:00.0"),
        ("00010000:02:00.0", "00010000:02:00.0"),
        ("00:00.0", "00:00.0"),
        ("", "–"),
    ],
)
def test_a_zero_domain_is_left_out(as_nvml_gave_it: str, shown: str) -> None:
    assert short_pci_address(GpuDevice(0, pci_bus_id=as_nvml_gave_it)) == shown


def test_the_page_shows_cards_without_their_identity() -> None:
    page = dashboard_page()

    for text in (
        "01:00.0",
        "00010000:02:00.0",
        "97 %",
        "20.0 GiB / 140.4 GiB",
        "35 °C",
        "70.1 W",
        "2.5 s",
        "1d 1h 1m 1s",
        "0.40",
    ):
        assert text in page
    assert "<dt>GPU Ready State</dt><dd>true</dd>" in page
    assert "<dt>Confidential Computing</dt><dd>unknown</dd>" in page
    assert "GPU-5f0c1e52" not in page


def test_without_public_sysinfo_only_the_app_is_shown() -> None:
    page = render_dashboard(GUEST, None)

    assert "a1b2c3" in page
    for text in ("System", "GPU", "Uptime", "6.9.0-dstack", "W</td>"):
        assert text not in page


def test_a_guest_without_a_card_says_so() -> None:
    assert "No NVIDIA GPUs" in render_dashboard(GUEST, Figures(SYSTEM, GpuSnapshot()))


def test_an_error_stands_in_place_of_the_table_and_is_escaped() -> None:
    page = render_dashboard(GUEST, Figures(SYSTEM, GpuSnapshot(error="<b>broken</b>")))

    assert "&lt;b&gt;broken&lt;/b&gt;" in page
    assert "<table>" not in page


def test_gpu_figures_stay_when_the_systems_are_missing() -> None:
    page = render_dashboard(GUEST, Figures(None, SNAPSHOT))

    assert "70.1 W" in page
    assert "The system&#39;s figures are not available." in page or "The system's figures are not available." in page


def test_the_page_needs_nothing_from_elsewhere_and_no_script() -> None:
    page = dashboard_page()
    for text in ("http://", "https://", "<script", "src=", "@import", "url("):
        assert text not in page


@given(snapshots)
@settings(max_examples=100, deadline=None)
def test_no_reading_breaks_the_page_or_becomes_markup(snapshot: GpuSnapshot) -> None:
    hostile = replace(snapshot, gpus=tuple(replace(d, pci_bus_id=f"<i>{d.pci_bus_id}") for d in snapshot.gpus))
    page = render_dashboard(GUEST, Figures(SYSTEM, hostile))

    assert page.endswith("</html>")
    assert "<i>" not in page
