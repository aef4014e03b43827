"""The shipped Prometheus files: sound, each alert tried both ways by promtool, and loaded by a real Prometheus that scrapes a
real aggregator."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggregator.fleet_metrics import fleet_page
from aggregator.maintenance import Maintenance
from aggregator.metrics import SelfMetrics
from aggregator.settings import Retention
from aggregator.spool import DEFAULT_MAX_BYTES
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.metrics import device_families, snapshot_families
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.golden import ROOT
from tests.needs import program_or_skip
from tests.processes import free_port, running

FOLDER = ROOT / "deploy/prometheus"
RULES = FOLDER / "gpu-fleet.rules.yml"
RULES_TEXT = RULES.read_text()
DOC = (ROOT / "docs/prometheus.md").read_text()
RECORDED = set(re.findall(r"- record: (\S+)", RULES_TEXT))
ALERTS = dict(re.findall(r"- alert: (\w+)\n(.*?)(?=\n\n|\Z)", RULES_TEXT, re.DOTALL))
QUERIES = re.findall(r"```promql\n(.*?)```", DOC, re.DOTALL)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([program_or_skip("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_sound() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", FOLDER / "prometheus.yml")


# The rules, on series made up

Labels = Mapping[str, str]
Series = Mapping[str, str]  # values, in promtool's notation of one a minute, by series


def try_rules(tmp_path: Path, *tests: Mapping[str, Any], every: str = "1m") -> None:
    """JSON is YAML too."""
    shutil.copy(RULES, tmp_path)
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [RULES.name], "evaluation_interval": every, "tests": tests}))
    promtool("test", "rules", tmp_path / "test.yml")


def written(name: str, labels: Labels) -> str:
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def a_test(series: Series, expected: Mapping[str, Mapping[str, float]], at: str = "30m") -> dict[str, Any]:
    """`expected`: by query, values by series."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": at,
                "exp_samples": [{"labels": name, "value": value} for name, value in found.items()],
            }
            for query, found in expected.items()
        ],
    }


ONE = {"job": "gpu-aggregator", "instance": "aggregator-1:8080"}
OTHER = {"job": "gpu-aggregator", "instance": "aggregator-2:8080"}
GUEST = {"job": "gpu-guests", "instance": "vm-1"}
CVM = {"vmm": "host-1", "vm_id": "vm-1", "vm_name": "training", "app_id": "app-1"}
CARD = {**CVM, "index": "0", "uuid": "GPU-1", "pci_bus_id": "00000000:01:00.0", "host_bdf": "0000:19:00.0"}


def on_both(name: str, labels: Labels, values: str) -> dict[str, str]:
    """On the pages of two aggregators of one database."""
    return {written(name, {**page, **labels}): values for page in (ONE, OTHER)}


def on_one(name: str, values: str, **labels: str) -> dict[str, str]:
    return {written(name, {**ONE, **labels}): values}


def without(labels: Labels, *names: str) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name not in names}


def late_turns(soon: int, late: int) -> dict[str, str]:
    """The histogram of turns, so many a minute within a second and between 5 and 10 s after their time."""
    counts = {"1": soon, "5": soon, "10": soon + late, "+Inf": soon + late}
    name = "gpu_aggregator_turn_lag_seconds_bucket"
    return {series: values for le, n in counts.items() for series, values in on_one(name, f"0+{n}x60", le=le).items()}


@dataclass(frozen=True)
class Case:
    """What makes an alert fire, once and with these labels, and what must not."""

    fires: Series
    labels: Labels
    quiet: tuple[Series, ...]
    at: str = "30m"
    every: str = "1m"


GIB = 2**30
CASES = {
    "GpuCvmSilent": Case(
        # Whatever the reason is just then.
        {
            **on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "timeout"}, "1x15 stale _x4 1x20"),
            **on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "unreachable"}, "_x15 1x5 stale"),
        },
        CVM,
        (
            on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "vmm_unreachable"}, "1x30"),
            on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "ok"}, "1x30"),
            on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "timeout"}, "_x20 1x10"),
        ),
        at="29m",
    ),
    "GpuNvmlDown": Case(
        on_both("dstack_gpu_nvml_up", CVM, "0x30"),
        CVM,
        (on_both("dstack_gpu_nvml_up", CVM, "1x30"), {written("dstack_gpu_nvml_up", GUEST): "0x30"}),
    ),
    "GpuCcNotReady": Case(
        {**on_both("dstack_gpu_cc_ready", CVM, "0x30"), **on_both("dstack_gpu_cc_enabled", CVM, "1x30")},
        CVM,
        (
            {**on_both("dstack_gpu_cc_ready", CVM, "0x30"), **on_both("dstack_gpu_cc_enabled", CVM, "0x30")},
            {**on_both("dstack_gpu_cc_ready", CVM, "1x30"), **on_both("dstack_gpu_cc_enabled", CVM, "1x30")},
            on_both("dstack_gpu_cc_ready", CVM, "0x30"),
        ),
    ),
    "GpuSchemaDrift": Case(
        {
            **on_both("gpu_aggregator_cvm_schema_status", {**CVM, "schema_status": "newer"}, "1x30"),
            **on_both("gpu_aggregator_cvm_outcome", {**CVM, "outcome": "schema_mismatch"}, "1x30"),
        },
        CVM,
        (
            on_both("gpu_aggregator_cvm_schema_status", {**CVM, "schema_status": "match"}, "1x30"),
            on_both("gpu_aggregator_cvm_schema_status", {**CVM, "schema_status": "unversioned"}, "1x30"),
        ),
    ),
    "GpuHot": Case(
        on_both("dstack_gpu_temperature_celsius", CARD, "84 85x30"),
        without(CARD, "pci_bus_id"),
        (
            on_both("dstack_gpu_temperature_celsius", CARD, "84x30"),
            on_both("dstack_gpu_temperature_celsius", CARD, "95x27 70x3"),
            {written("dstack_gpu_temperature_celsius", {**GUEST, "index": "0"}): "95x30"},
        ),
    ),
    "GpuCardMissing": Case(
        on_both("gpu_aggregator_card_state", {**CARD, "state": "detached"}, "1x30"),
        {**without(CARD, "index", "pci_bus_id"), "state": "detached"},
        (
            on_both("gpu_aggregator_card_state", {**CARD, "state": "ok"}, "1x30"),
            on_both("gpu_aggregator_card_state", {**CARD, "state": "silent"}, "1x30"),
            on_both("gpu_aggregator_card_state", {**CARD, "state": "stale"}, "_x25 1x5"),
        ),
    ),
    "GpuCardContested": Case(
        on_both("gpu_aggregator_card_state", {**without(CARD, "uuid"), "state": "contested"}, "1x30"),
        without(CARD, "uuid", "host_bdf"),
        (on_both("gpu_aggregator_card_state", {**CARD, "state": "ok"}, "1x30"),),
    ),
    "GpuVmmUnreachable": Case(
        on_one("gpu_aggregator_vmm_up", "0x30", vmm="host-1"),
        {"vmm": "host-1"},
        (
            on_one("gpu_aggregator_vmm_up", "1x30", vmm="host-1"),
            # Taken over by another aggregator.
            {
                **on_one("gpu_aggregator_vmm_up", "0x30", vmm="host-1"),
                written("gpu_aggregator_vmm_up", {**OTHER, "vmm": "host-1"}): "1x30",
            },
        ),
    ),
    "GpuVmmNotPolled": Case(
        on_both("gpu_aggregator_vmm_lease", {"vmm": "host-1"}, "0x30"),
        {"vmm": "host-1"},
        (
            {
                **on_one("gpu_aggregator_vmm_lease", "0x30", vmm="host-1"),
                written("gpu_aggregator_vmm_lease", {**OTHER, "vmm": "host-1"}): "1x30",
            },
            # Taken over.
            {
                **on_one("gpu_aggregator_vmm_lease", "1x10 stale", vmm="host-1"),
                written("gpu_aggregator_vmm_lease", {**OTHER, "vmm": "host-1"}): "0x11 1x20",
            },
            {
                **on_one("gpu_aggregator_vmm_lease", "0x30", vmm="host-1"),
                **on_one("gpu_aggregator_database_up", "0x30"),
            },
        ),
    ),
    "GpuIdle": Case(
        on_both("dstack_gpu_utilization_percent", CARD, "0x100 1x20 0x260"),
        without(CARD, "pci_bus_id"),
        (
            on_both("dstack_gpu_utilization_percent", CARD, "0x200 50x10 0x170"),
            on_both("dstack_gpu_utilization_percent", CARD, "2x380"),
            on_both("dstack_gpu_utilization_percent", CARD, "_x120 0x260"),
        ),
        at="6h15m",
        every="5m",
    ),
    "GpuAggregatorDown": Case(on_one("up", "0x30"), ONE, (on_one("up", "1x30"), {written("up", GUEST): "0x30"})),
    "GpuDatabaseAway": Case(
        on_one("gpu_aggregator_database_up", "0x30"),
        ONE,
        (on_one("gpu_aggregator_database_up", "1x30"), on_one("gpu_aggregator_database_up", "1x20 0x2 1x10")),
    ),
    "GpuFleetMissing": Case(
        {**on_one("gpu_aggregator_fleet_up", "0x30"), **on_one("gpu_aggregator_database_up", "1x30")},
        ONE,
        (
            {**on_one("gpu_aggregator_fleet_up", "0x30"), **on_one("gpu_aggregator_database_up", "0x30")},
            {**on_one("gpu_aggregator_fleet_up", "1x30"), **on_one("gpu_aggregator_database_up", "1x30")},
        ),
    ),
    "GpuSpoolFilling": Case(
        on_one("gpu_aggregator_spool_bytes", f"0+{GIB // 60}x30"),
        ONE,
        (
            on_one("gpu_aggregator_spool_bytes", f"0+{GIB // 600}x30"),
            # What came in an outage goes out again.
            on_one("gpu_aggregator_spool_bytes", f"{GIB // 2}-{GIB // 100}x30"),
            {**on_one("gpu_aggregator_spool_bytes", "0x30"), **on_one("gpu_aggregator_spool_up", "1x30")},
        ),
    ),
    "GpuPollsLost": Case(
        on_one("gpu_aggregator_polls_dropped_total", "0x20 5x10", where="memory"),
        {"instance": ONE["instance"]},
        (
            {
                **on_one("gpu_aggregator_polls_dropped_total", "0x30", where="memory"),
                **on_one("gpu_aggregator_polls_set_aside_total", "7x30"),
            },
            on_one("gpu_aggregator_polls_dropped_total", "0x2 5x30", where="memory"),
        ),
    ),
    "GpuPollsLate": Case(
        late_turns(soon=90, late=10),
        {"instance": ONE["instance"]},
        (late_turns(soon=99, late=1), late_turns(soon=0, late=0)),
        at="45m",
    ),
    "GpuHistoryBehind": Case(
        {
            **on_both("gpu_aggregator_rollup_lag_seconds", {"resolution": "5m"}, "7000+60x60"),
            **on_both("gpu_aggregator_rollup_lag_seconds", {"resolution": "1h"}, "9000x60"),
            **on_one("gpu_aggregator_database_up", "1x60"),
        },
        {"resolution": "5m"},
        (
            {
                **on_both("gpu_aggregator_rollup_lag_seconds", {"resolution": "5m"}, "3600x60"),
                **on_both("gpu_aggregator_rollup_lag_seconds", {"resolution": "1h"}, "9000x60"),
            },
            {
                **on_both("gpu_aggregator_rollup_lag_seconds", {"resolution": "1h"}, "90000x60"),
                **on_one("gpu_aggregator_database_up", "0x60"),
            },
            # One of them no longer looks, the other one sees the progress.
            {
                **on_one("gpu_aggregator_rollup_lag_seconds", "90000x60", resolution="5m"),
                written("gpu_aggregator_rollup_lag_seconds", {**OTHER, "resolution": "5m"}): "600x60",
            },
        ),
        at="50m",
    ),
    "GpuHistoryFailing": Case(
        {
            **on_one("gpu_aggregator_history_failures_total", "0+1x120", kind="disk_full"),
            **on_one("gpu_aggregator_database_up", "1x120"),
        },
        {"instance": ONE["instance"], "kind": "disk_full"},
        (
            # It failed for some minutes.
            on_one("gpu_aggregator_history_failures_total", "0x30 0+1x10 10x80", kind="locked"),
            {
                **on_one("gpu_aggregator_history_failures_total", "0+1x120", kind="unreachable"),
                **on_one("gpu_aggregator_database_up", "0x120"),
            },
        ),
        at="90m",
    ),
}


def test_every_alert_is_tried() -> None:
    assert CASES.keys() == ALERTS.keys()


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_once_for_its_reason_and_for_no_other(tmp_path: Path, alert: str) -> None:
    case = CASES[alert]
    firing = f'ALERTS{{alertname="{alert}", alertstate="firing"}}'
    severity = re.findall(r"severity: (\w+)", ALERTS[alert])[0]
    labels = {"alertname": alert, "alertstate": "firing", "severity": severity, **case.labels}
    fires = a_test(case.fires, {firing: {written("ALERTS", labels): 1}}, case.at)
    try_rules(tmp_path, fires, *(a_test(series, {firing: {}}, case.at) for series in case.quiet), every=case.every)


@pytest.mark.parametrize(
    ("name", "values"), [("gpu_aggregator_spool_bytes", f"{GIB * 4 // 5}x30"), ("gpu_aggregator_spool_up", "0x30")]
)
def test_a_spool_that_is_nearly_full_or_takes_nothing_fires_too(tmp_path: Path, name: str, values: str) -> None:
    query = 'count(ALERTS{alertname="GpuSpoolFilling", alertstate="firing"})'
    try_rules(tmp_path, a_test(on_one(name, values), {query: {"{}": 1}}))


def test_the_rule_and_the_spool_have_one_bound() -> None:
    assert set(re.findall(r"[0-9]{7,}", ALERTS["GpuSpoolFilling"])) == {str(DEFAULT_MAX_BYTES)}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_says_how_bad_it_is_and_what_to_do_with_labels_that_it_has(alert: str) -> None:
    text = ALERTS[alert]
    assert re.findall(r"severity: (\w+)", text)[0] in ("info", "warning", "critical")
    assert ("summary: " in text, "description: " in text) == (True, True)
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= CASES[alert].labels.keys()


def test_what_is_recorded_counts_a_card_once_and_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    second = {**CARD, "index": "1", "uuid": "GPU-2"}
    elsewhere = {**CARD, "vmm": "host-2", "vm_id": "vm-9", "uuid": "GPU-3"}
    series = {
        **on_both("dstack_gpu_utilization_percent", CARD, "100x5"),
        **on_both("dstack_gpu_utilization_percent", second, "50x5"),
        **on_both("dstack_gpu_utilization_percent", elsewhere, "0x5"),
        **on_both("dstack_gpu_memory_total_bytes", CARD, "100x5"),
        **on_both("dstack_gpu_memory_used_bytes", CARD, "25x5"),
        **on_both("dstack_gpu_memory_total_bytes", second, "100x5"),
        **on_both("dstack_gpu_power_usage_milliwatts", CARD, "600000x5"),
        **on_both("dstack_gpu_power_usage_milliwatts", second, "500x5"),
        **on_both("gpu_aggregator_card_state", {**CARD, "state": "ok"}, "1x5"),
        **on_both("gpu_aggregator_card_state", {**second, "state": "ok"}, "1x5"),
        **on_both("gpu_aggregator_card_state", {**elsewhere, "state": "stale"}, "1x5"),
        # The same card, scraped from its host's proxy too.
        written("dstack_gpu_utilization_percent", {**GUEST, **without(CARD, "vmm")}): "7x5",
    }
    expected = {
        "vmm:dstack_gpu_utilization_percent:avg": {'{vmm="host-1"}': 75, '{vmm="host-2"}': 0},
        "app_id:dstack_gpu_utilization_percent:avg": {'{app_id="app-1"}': 50},
        "vmm:dstack_gpu_memory_used:ratio": {'{vmm="host-1"}': 0.25},
        "app_id:dstack_gpu_memory_used:ratio": {'{app_id="app-1"}': 0.25},
        "vmm:dstack_gpu_power_usage_watts:sum": {'{vmm="host-1"}': 600.5},
        "app_id:dstack_gpu_power_usage_watts:sum": {'{app_id="app-1"}': 600.5},
        "vmm_state:gpu_aggregator_cards:count": {
            '{vmm="host-1", state="ok"}': 2,
            '{vmm="host-2", state="stale"}': 1,
        },
        "app_id_state:gpu_aggregator_cards:count": {
            '{app_id="app-1", state="ok"}': 2,
            '{app_id="app-1", state="stale"}': 1,
        },
    }
    assert expected.keys() == RECORDED
    queries = {
        name: {f"{name}{labels}": value for labels, value in found.items()}
        for name, found in expected.items()
    }  # fmt: skip
    try_rules(tmp_path, a_test(series, queries, "5m"))


# The docs


def test_every_alert_and_recorded_series_is_in_the_docs() -> None:
    assert re.findall(r"^\| `(Gpu\w+)` \|", DOC, re.MULTILINE) == list(ALERTS)
    assert set(re.findall(r"\b[a-z_]+:[a-z_]+:[a-z]+\b", DOC)) == RECORDED


async def test_every_metric_that_is_named_is_there(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
        writer = Writer(store, tmp_path / "spool")
        page = SelfMetrics(writer, Maintenance(store, Retention())).page("")[0] + fleet_page(
            [], [], now_ms=0, stale_after_s=120
        )
        await writer.close()
    there = set(re.findall(r"^# TYPE (\S+)", page.decode(), re.MULTILINE))
    there |= {family.name for family in [*device_families([({}, GpuDevice(0))]), *snapshot_families({}, GpuSnapshot())]}
    proxy = "\n".join(path.read_text() for path in (ROOT / "host_proxy").glob("*.py"))
    there |= set(re.findall(r'"((?:gpu_host_proxy|dstack_gpu_probe)_\w+)"', proxy))
    for text in (DOC, RULES_TEXT, (FOLDER / "prometheus.yml").read_text()):
        named = set(re.findall(r"(?<![\w:])((?:dstack_gpu|gpu_aggregator|gpu_host_proxy)_\w+\b)(?![*:])", text))
        assert {name.removesuffix("_bucket") for name in named} - there == set()


def test_the_queries_in_the_docs_find_what_they_say(tmp_path: Path) -> None:
    link, whose, fallen = QUERIES
    node = {"job": "node", "instance": "host-1:9100", "vmm": "host-1"}
    place = {"segment": "0000", "bus": "19", "device": "00", "function": "0"}
    series = {
        **on_both("gpu_aggregator_card_state", {**CARD, "state": "ok"}, "1x5"),
        **on_both("gpu_aggregator_card_state", {**CARD, "uuid": "GPU-2", "host_bdf": "0000:3b:00.0", "state": "ok"}, "1x5"),
        written("node_pcidevice_current_link_width", {**node, **place}): "8x5",
        written("node_pcidevice_max_link_width", {**node, **place}): "16x5",
        written("node_pcidevice_current_link_width", {**node, **place, "bus": "3b"}): "16x5",
        written("node_pcidevice_max_link_width", {**node, **place, "bus": "3b"}): "16x5",
        written("node_pcidevice_current_link_width", {**node, **place, "bus": "3b", "vmm": "host-2"}): "4x5",
        written("node_pcidevice_max_link_width", {**node, **place, "bus": "3b", "vmm": "host-2"}): "16x5",
        written("DCGM_FI_DEV_XID_ERRORS", {"job": "dcgm", "gpu": "0", "UUID": "GPU-1"}): "79x5",
    }
    where = {"vmm": "host-1", "vm_id": "vm-1", "host_bdf": CARD["host_bdf"]}
    expected = {
        link: {written("", {**where, "app_id": "app-1"}): 8},
        whose: {written("", {**without(CVM, "vmm"), "uuid": "GPU-1", "state": "ok"}): 1},
        fallen: {written("", {**where, "uuid": "GPU-1"}): 79},
    }
    try_rules(tmp_path, a_test(series, expected, "5m"))


# For real


def ask(port: int, path: str, **parameters: str) -> Any:
    """`data` of Prometheus' answer; None while it is not up."""
    try:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        return json.load(urllib.request.urlopen(url))["data"]
    except (OSError, urllib.error.HTTPError):
        return None


def labels_of(port: int, query: str) -> list[dict[str, str]]:
    found = ask(port, "query", query=query)
    return [entry["metric"] for entry in found["result"]] if found else []


def scrape_for_real(folder: Path) -> None:
    aggregator, prometheus = free_port(), free_port()
    (folder / RULES.name).write_text(RULES_TEXT.replace("interval: 5m", "interval: 1s"))
    config = (FOLDER / "prometheus.yml").read_text().replace("15s", "1s")
    assert config.count("aggregator-1:8080") == 1
    config = config.replace("aggregator-1:8080", f"127.0.0.1:{aggregator}")
    (folder / "prometheus.yml").write_text(re.sub(r"host-1:\d+", f"127.0.0.1:{free_port()}", config))
    flags = ["--vmm", f"host-1=unix:{folder}/vmm.sock", "--db", f"sqlite:///{folder}/history.db"]
    flags += ["--listen", f"127.0.0.1:{aggregator}", "--interval", "1"]
    with ExitStack() as stack:
        stack.enter_context(running("gpu-aggregator", flags, folder / "log"))
        server = stack.enter_context(
            subprocess.Popen(
                [
                    program_or_skip("prometheus"),
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{prometheus}",
                ],
                stderr=stack.enter_context((folder / "prometheus.log").open("wb")),
            )
        )
        stack.callback(server.terminate)
        deadline = time.monotonic() + 40

        def wait_for(what: str, found: Any) -> None:
            assert time.monotonic() < deadline, f"{what}: {found}\n{(folder / 'prometheus.log').read_text()[-2000:]}"
            time.sleep(0.2)

        while not (found := labels_of(prometheus, 'dstack_gpu_utilization_percent{job="gpu-aggregator"} == 42')):
            wait_for("card", found)
        assert (found[0]["vmm"], found[0]["vm_id"], found[0]["uuid"]) == ("host-1", HOSTILE, "GPU-1")
        while not (found := labels_of(prometheus, 'gpu_aggregator_cvm_outcome{outcome="unreachable"}')):
            wait_for("outcome", found)
        assert found[0]["vm_id"] == "vm-2"
        while not (found := labels_of(prometheus, "vmm:dstack_gpu_utilization_percent:avg == 42")):
            wait_for("recorded", found)
        while not (found := labels_of(prometheus, 'ALERTS{alertname="GpuCvmSilent", vm_id="vm-2"}')):
            wait_for("alert", found)
        while True:
            rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
            if {rule["health"] for rule in rules} == {"ok"}:
                break
            wait_for("rules", [(rule["name"], rule["health"], rule.get("lastError")) for rule in rules])
        assert {rule["name"] for rule in rules} == RECORDED | ALERTS.keys()
        targets = {target["labels"]["job"]: target for target in ask(prometheus, "targets")["activeTargets"]}
        assert targets["gpu-aggregator"]["lastError"] == ""


HOSTILE = 'a "name"\\n\twith\r\nall\x01\x7f that \u2028 hurts 😀{}'


async def test_a_real_prometheus_finds_the_fleet_and_every_rule_works(short_dir: Path) -> None:
    program_or_skip("prometheus")
    card = GpuSnapshot((GpuDevice(0, "GPU-1", "00000000:01:00.0", utilization_gpu=42),), sample_age_ms=1)
    guests = [
        Guest(running_vm(HOSTILE), lambda: body_of(card)),
        Guest(running_vm("vm-2"), status=400, error="no route to the guest", headers={}),
    ]
    async with FakeVmm(guests, host_call_status=200).serving(short_dir / "vmm.sock"):
        await asyncio.to_thread(scrape_for_real, short_dir)
