"""The shipped Grafana dashboards: whole as Grafana reads them, and each question in them has an answer. PromQL is asked of a
real Prometheus that scrapes a real aggregator, SQL of a real PostgreSQL, with Grafana's variables and macros filled in."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import sql

from aggregator.comments import column_comment
from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from deploy.grafana import dashboards, fleet
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice, GpuSnapshot
from tests.aggregator.fleets import roll_up
from tests.aggregator.story import BEGIN_MS, END_MS, HOUR, UUIDS, tell
from tests.deploy.test_prometheus_rules import FOLDER as PROMETHEUS_FOLDER
from tests.deploy.test_prometheus_rules import RULES, RULES_TEXT, ask
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.golden import ROOT
from tests.needs import program_or_skip
from tests.postgres import postgres_url
from tests.processes import free_port, running

__all__ = ["postgres_url"]

Json = dict[str, Any]
Values = Mapping[str, str | Sequence[str]]

PROVISIONING = ROOT / "deploy/grafana/provisioning"
DASHBOARDS: dict[str, Json] = {path.stem: json.loads(path.read_text()) for path in sorted(PROVISIONING.rglob("*.json"))}
DOC = (ROOT / "docs/grafana.md").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(?::(\w+))?\}|\$(\w+)")
OF_GRAFANA = {"__all", "__from", "__to", "__interval", "__rate_interval", "__range", "__url_time_range"}


def panels_of(dashboard: Json) -> list[Json]:
    """Those in rows too, without the rows."""
    inner = [panel for row in dashboard["panels"] for panel in row.get("panels", [])]
    return [panel for panel in [*dashboard["panels"], *inner] if panel["type"] != "row"]


def asks(panel: Json, kind: str) -> bool:
    return any(target["datasource"]["type"] == kind for target in panel["targets"])


def variables(dashboard: Json) -> dict[str, Json]:
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def texts(value: Any) -> Iterator[str]:
    """Every text in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def properties(panel: Json, name: str) -> list[tuple[str, Any]]:
    """Of a panel's fields, by the field."""
    return [
        (override["matcher"]["options"], one["value"])
        for override in panel["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == name
    ]


# As Grafana reads them


def test_there_is_a_file_for_each_of_them() -> None:
    assert DASHBOARDS.keys() == dashboards.DASHBOARDS.keys()


def test_the_provisioning_finds_them_and_names_both_sources() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/gpu.yaml").read_text())["providers"]
    sources = yaml.safe_load((PROVISIONING / "datasources/gpu.yaml").read_text())["datasources"]

    assert provider["options"]["path"] == f"/etc/grafana/provisioning/{dashboards.FOLDER.name}"
    assert {source["type"] for source in sources} == {
        variable["query"]
        for dashboard in DASHBOARDS.values()
        for variable in variables(dashboard).values()
        if variable["type"] == "datasource"
    }
    named = set(re.findall(r"\$\{?(\w+)", json.dumps(sources)))
    assert named == set(re.findall(r"\bGPU_[A-Z_]+", DOC)), "each setting is in the docs"


def test_names_and_numbers_are_told_once() -> None:
    assert {dashboard["uid"] for dashboard in DASHBOARDS.values()} == DASHBOARDS.keys()
    assert len({dashboard["title"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)
    for dashboard in DASHBOARDS.values():
        rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
        ids = [panel["id"] for panel in [*rows, *panels_of(dashboard)]]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_no_panel_lies_on_another_or_leaves_the_page(uid: str) -> None:
    panels = [*panels_of(DASHBOARDS[uid]), *(panel for panel in DASHBOARDS[uid]["panels"] if panel["type"] == "row")]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0, panel["title"]
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (one["title"], other["title"])


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_each_panel_says_what_it_shows_and_in_which_unit(uid: str) -> None:
    for panel in panels_of(DASHBOARDS[uid]):
        assert panel["title"]
        assert re.fullmatch(r"[A-Z].*[.]", panel["description"]), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        if panel["type"] in ("stat", "timeseries", "barchart"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] == "table" and asks(panel, "prometheus"):
            told = dict(properties(panel, "unit")).keys() | dict(properties(panel, "mappings")).keys()
            excluded = {name for step in panel["transformations"] for name in step["options"].get("excludeByName", {})}
            values = {"Value"} if len(panel["targets"]) == 1 else {f"Value #{target['refId']}" for target in panel["targets"]}
            assert values - excluded <= told, panel["title"]
            assert not excluded & {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_time_without_data_is_a_gap(uid: str) -> None:
    for panel in panels_of(DASHBOARDS[uid]):
        if panel["type"] in ("timeseries", "state-timeline"):
            custom = panel["fieldConfig"]["defaults"]["custom"]
            assert custom["spanNulls"] is False
            for target in panel["targets"]:
                filled_up = "$__timeGroupAlias(bucket, $__interval, NULL)" in target.get("rawSql", "")
                assert custom.get("drawStyle") != "line" or "expr" in target or filled_up, panel["title"]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_a_figure_of_now_does_not_outlive_its_series(uid: str) -> None:
    for panel in panels_of(DASHBOARDS[uid]):
        if panel["type"] == "stat":
            assert panel["options"]["reduceOptions"]["calcs"] == ["last"]
        if panel["type"] in ("stat", "table") and asks(panel, "prometheus"):
            assert all(target["instant"] and not target["range"] for target in panel["targets"])


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_variable_that_is_used_is_there_and_used(uid: str) -> None:
    dashboard = DASHBOARDS[uid]
    used = {
        braced or plain
        for text in texts(dashboard)
        for braced, _, plain in VARIABLE.findall(text)
        if not text.startswith("/d/") and not (braced or plain).startswith(("__data", "__field", "__value", "__time"))
    }
    linked = {name for text in texts(dashboard) if text.startswith("/d/") for name, _, _ in VARIABLE.findall(text) if name}
    assert used - OF_GRAFANA <= variables(dashboard).keys()
    assert linked - OF_GRAFANA <= variables(dashboard).keys()
    assert used | linked >= variables(dashboard).keys()


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_links_lead_to_dashboards_with_the_variables_that_they_set(uid: str) -> None:
    for url in [text for text in texts(DASHBOARDS[uid]["panels"]) if text.startswith("/d/")]:
        target, query = re.fullmatch(r"/d/([\w-]+)\?(.*)", url).groups()  # type: ignore[union-attr]
        set_there = set(re.findall(r"var-(\w+)=", query))
        assert set_there
        assert set_there == {name for name, one in variables(DASHBOARDS[target]).items() if one["type"] != "datasource"}


def test_the_way_leads_from_the_fleet_to_each_card() -> None:
    ways = {
        uid: {link for text in texts(DASHBOARDS[uid]["panels"]) for link in re.findall(r"^/d/([\w-]+)", text)}
        for uid in DASHBOARDS
    }
    assert "gpu-host" in ways["gpu-fleet"]
    assert "gpu-cvm" in ways["gpu-host"]
    assert "gpu-card" in ways["gpu-cvm"]


def test_the_words_that_have_colours_are_those_that_there_are() -> None:
    def told(view: str, column: str) -> str:
        return column_comment(view, column) or ""

    def listed(text: str) -> set[str]:
        return set(text.removesuffix(".").replace(" or ", ", ").split(", "))

    assert {word for word in fleet.STATES if re.search(rf"\b{word}\b", told("v_gpu_latest", "state"))} == fleet.STATES.keys()
    assert listed(told("v_cvm_state", "outcome")) == fleet.OUTCOMES.keys()
    assert listed(told("v_cvm_state", "schema_status").partition(": ")[2]) == fleet.SCHEMAS.keys()


def test_the_docs_tell_of_each_dashboard() -> None:
    assert re.findall(r"^\| `(gpu-[a-z]+)` \|", DOC, re.MULTILINE) == list(dashboards.DASHBOARDS)


def test_each_panel_that_the_docs_name_is_there() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w*(?: \w+)*)`", DOC)) - {"History", "Prometheus", "PostgreSQL"}
    assert len(named) > 5
    assert named <= {panel["title"] for dashboard in DASHBOARDS.values() for panel in panels_of(dashboard)}


# SQL, of a fleet whose figures are known


def instant(at_ms: int) -> str:
    return f"'{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}'"


def seconds(interval: str) -> int:
    return int(interval[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[interval[-1]]


def expanded(query: str, values: Values, start_ms: int, end_ms: int) -> str:
    """As Grafana's documentation says: variables first, then the macros."""

    def value_of(match: re.Match[str]) -> str:
        name, kind = match[1] or match[3], match[2]
        plain = {"__from": str(start_ms), "__to": str(end_ms), "__interval": "1h"}
        if name in plain:
            return plain[name]
        if name not in values:
            return match[0]
        assert kind == "sqlstring", f"{match[0]} is not quoted"
        given = values[name]
        return ",".join("'" + one.replace("'", "''") + "'" for one in ([given] if isinstance(given, str) else given))

    def group(match: re.Match[str]) -> str:
        column, interval = match[2].split(",")[:2]
        width = seconds(interval.strip().strip("'"))
        return f"floor(extract(epoch from {column})/{width})*{width}" + (' AS "time"' if match[1] else "")

    query = VARIABLE.sub(value_of, query)
    query = re.sub(r"\$__timeGroup(Alias)?\(([^)]*)\)", group, query)
    query = re.sub(r"\$__timeFilter\(([^)]*)\)", rf"\1 BETWEEN {instant(start_ms)} AND {instant(end_ms)}", query)
    query = query.replace("$__timeFrom()", instant(start_ms)).replace("$__timeTo()", instant(end_ms))
    assert "$" not in query, query
    return query


OF_STORY: dict[str, Values] = {
    "gpu-fleet": {"vmm": ["rack1", "rack2"]},
    "gpu-host": {"vmm": "rack2"},
    "gpu-cvm": {"vmm": "rack2", "vm_id": "vm-legacy"},
    "gpu-card": {"uuid": UUIDS[1]},
}


@contextmanager
def reader(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that may do what docs/operations.md grants to gpu_reader."""
    grant = re.findall(r"^GRANT .* TO gpu_reader;$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert len(grant) == 1
    name = f"reader_{secrets.token_hex(6)}"
    role = sql.Identifier(name)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(role))
        try:
            connection.execute(grant[0].replace("gpu_reader", name).encode())
            connection.execute(sql.SQL("SET ROLE {}").format(role))
            yield connection
        finally:
            connection.execute("RESET ROLE")
            connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


def test_every_question_to_postgresql_is_answered_to_a_reader(postgres_url: str) -> None:
    with closing(Store(postgres_url, max_lag_s=0)) as store:
        store.require_current()
        tell(store)
    asked: dict[tuple[str, str], list[Json]] = {}
    with reader(postgres_url) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM tenancy")
        for uid, dashboard in DASHBOARDS.items():
            for panel in panels_of(dashboard):
                for target in panel["targets"]:
                    if "rawSql" in target:
                        query = expanded(target["rawSql"], OF_STORY[uid], BEGIN_MS, END_MS)
                        cursor = connection.execute(query.encode())
                        columns = [column.name for column in cursor.description or []]
                        rows = asked[uid, panel["title"]] = [dict(zip(columns, map(plain, row), strict=True)) for row in cursor]
                        assert_shown(panel, target, rows, f"{uid}: {panel['title']}")

    by_app = {row["app_id"]: row for row in asked["gpu-fleet", "Hours and energy by app"]}
    assert {app: round(row["idle_h"], 1) for app, row in by_app.items()} == {
        "notebooks": 66,
        "serving": 20,
        "batch": 8,
        "training": 0,
    }
    # For two hours its card did not tell how busy it was; the last sample is of two minutes before the end.
    assert round(by_app["batch"]["unknown_h"], 1) == 2
    assert round(by_app["batch"]["attached_h"], 1) == 25.9
    assert round(by_app["training"]["kwh"], 2) == 29.98
    days = asked["gpu-card", "Hours by day"]
    assert [(round(day["busy"] + day["idle"] + day["unknown"]), round(day["idle"])) for day in days] == [(24, 4), (14, 4)]
    holders = [row["value"] for row in asked["gpu-card", "Who had it, and where"]]
    assert holders == ["trainer", None, "batch", None]
    used = {row["utilization"]: round(row["hours"], 1) for row in asked["gpu-card", "How its time was used"] if row["hours"]}
    assert used == {"up to 0 %": 8, "up to 80 %": 15.9, "up to 95 %": 12}
    silent = asked["gpu-fleet", "Hours without an answer"]
    assert {(row["vm_id"], row["outcome"], round(row["hours"], 1)) for row in silent} == {
        ("vm-silent", "timeout", 1.9),
        ("vm-legacy", "unreachable", 1.0),
    }


def plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def assert_shown(panel: Json, target: Json, rows: Sequence[Json], where: str) -> None:
    """There is something to show, in the columns that the panel names."""
    assert rows, where
    columns = rows[0].keys()
    named = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    assert named <= columns, where
    if panel["type"] == "table":
        assert columns <= named, f"{where}: a column without a head"
        links = [url["url"] for _, links in properties(panel, "links") for url in links]
        assert {name for url in links for name in re.findall(r"__data\.fields\.(\w+)", url)} <= columns, where
    if target["format"] == "time_series" or panel["type"] == "state-timeline":
        times = [row["time"] for row in rows]
        assert panel["type"] == "state-timeline" or times == sorted(times), where
    for name in re.findall(r"__field\.labels\.(\w+)", panel["fieldConfig"]["defaults"].get("displayName", "")):
        assert name in columns, where
    for step in panel.get("transformations", []):
        assert set(step["options"].get("fields", [])) <= columns, where
    # A column of nothing but NULL shows that a join or a condition is wrong. No answer has told of this one.
    empty = {column for column in columns if all(row[column] is None for row in rows)}
    assert empty <= {"cc_ready"}, where


# PromQL, of an aggregator that knows good and bad

GIB = 2**30
TOTAL = 80 * GIB
UUID_OF = tuple(f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "1234")
BUSY = GpuDevice(0, UUID_OF[0], "00000000:01:00.0", 97, 40, TOTAL, 60 * GIB, 20 * GIB, 88, 650_000, ("power: Not Supported",))
LYING = replace(BUSY, index=1, uuid=UUID_OF[1], pci_bus_id="00000000:02:00.0", temperature_c=999, errors=())
IDLE = replace(BUSY, uuid=UUID_OF[2], utilization_gpu=0, power_usage_mw=80_000, temperature_c=30, errors=())
GONE = Cvm("rack1", "vm-gone")

OF_PROMETHEUS: dict[str, Values] = {
    "gpu-fleet": {"vmm": ["rack1", "rack2"]},
    "gpu-host": {"vmm": "rack1"},
    "gpu-cvm": {"vmm": "rack1", "vm_id": "vm-busy"},
    "gpu-card": {"uuid": UUID_OF[0]},
    "gpu-aggregator": {},
}
# Two cards of vm-busy, one that vm-idle has and vm-claims says it has, one of a CVM that is gone.
FIGURES = {
    "Cards": 5,
    "Busy": 2,
    "Idle": 2,
    "Not ok": 2,
    "CVMs": 6,
    "CVMs silent": 2,
    "CC not ready": 4,
    "Power": 1460,
}
# Asked when the rest is answered: while the database is away there is no fleet.
OF_TROUBLE = {"Trouble with the database"}
LIMIT_S = 60


def guests() -> list[Guest]:
    def answers(*cards: GpuDevice, error: str = "") -> Callable[[], bytes]:
        return lambda: body_of(GpuSnapshot(cards, error, cc_ready=False, cc_enabled=True, sample_age_ms=1))

    return [
        Guest(running_vm("vm-busy", ["17:00.0", "18:00.0"]), answers(BUSY, LYING)),
        Guest(running_vm("vm-idle", ["3b:00.0"]), answers(IDLE)),
        Guest(running_vm("vm-claims"), answers(replace(IDLE, pci_bus_id="00000000:05:00.0"))),
        Guest(running_vm("vm-down"), answers(error="NVIDIA driver is not loaded")),
        Guest(running_vm("vm-broken"), status=400, error="no route to the guest", headers={}),
        Guest(running_vm("vm-hangs"), hang=True),
    ]


def prefill(database: Path) -> None:
    """Samples that are too old to be kept, one that came late, and a table of hours that takes none: who looks after the
    history has something to delete, something to make again, and something that fails."""
    now = time.time_ns() // 1_000_000
    times = range(now - 4 * HOUR, now - 2 * HOUR, HOUR // 60)
    device = replace(IDLE, uuid=UUID_OF[3])
    polls = [Poll(GONE, at, "ok", samples=(Sample(device, at, Bdf.parse("01:00.0"), None),)) for at in times]
    with closing(Store(f"sqlite:///{database}", max_lag_s=0)) as store:
        store.require_current()
        store.write(polls[:30] + polls[31:])
        roll_up(store, now)
        store.write(polls[30:31])
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TRIGGER full BEFORE INSERT ON gpu_1h BEGIN SELECT RAISE(ABORT, 'nothing goes in'); END")


def filled(expr: str, values: Values) -> str:
    """As Grafana asks Prometheus."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        plain = {"__rate_interval": "15s", "__interval": "1s", "__range": "5m", "instance": ".*"}
        if name in plain:
            return plain[name]
        given = values[name]
        return given if isinstance(given, str) else f"({'|'.join(map(re.escape, given))})"

    return VARIABLE.sub(value_of, expr)


def questions() -> Iterator[tuple[str, str, Json, str]]:
    """Dashboard, panel's title, the panel, PromQL."""
    for uid, dashboard in DASHBOARDS.items():
        for panel in panels_of(dashboard):
            for target in panel["targets"]:
                if "expr" in target:
                    yield uid, panel["title"], panel, filled(target["expr"], OF_PROMETHEUS[uid])


@contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[int]:
    """The shipped files, quick: each second, and no alert waits. Its port."""
    port = free_port()
    rules = re.sub(r"for: \w+", "for: 0s", RULES_TEXT.replace("interval: 5m", "interval: 1s"))
    (folder / RULES.name).write_text(rules)
    config = (PROMETHEUS_FOLDER / "prometheus.yml").read_text().replace("15s", "1s")
    config = config.replace('["aggregator-1:8080"]', json.dumps(targets))
    (folder / "prometheus.yml").write_text(re.sub(r"host-1:\d+", f"127.0.0.1:{free_port()}", config))
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                program_or_skip("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )
    try:
        yield port
    finally:
        server.terminate()
        server.wait(15)


def answer(port: int, query: str, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
    """Values by labels; empty while Prometheus is not up."""
    found = ask(port, "query", query=query, **({} if at is None else {"time": str(at)}))
    return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found["result"]} if found else {}


def wait_until(found: Callable[[], Any], what: Callable[[], str], deadline: float) -> Any:
    while not (it := found()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
    return it


def ask_all(folder: Path) -> None:
    page, database = free_port(), folder / "history.db"
    prefill(database)
    flags = ["--vmm", f"rack1=unix:{folder}/vmm.sock", "--vmm", f"rack2=unix:{folder}/nobody.sock"]
    flags += ["--db", f"sqlite:///{database}", "--listen", f"127.0.0.1:{page}"]
    flags += ["--interval", "1", "--timeout", "3", "--retention-raw", "1h"]
    # One page as two targets: what counts a card twice shows. A third aggregator is down.
    one, other = f"127.0.0.1:{page}", f"localhost:{page}"
    deadline = time.monotonic() + LIMIT_S
    with ExitStack() as stack:
        stack.enter_context(running("gpu-aggregator", flags, folder / "log"))
        port = stack.enter_context(prometheus(folder, [one, other, f"127.0.0.1:{free_port()}"]))
        open_questions = {(uid, title, query): panel for uid, title, panel, query in questions()}

        def ask_what_is_open() -> bool:
            for (uid, title, query), panel in list(open_questions.items()):
                at = time.time()
                found = answer(port, query, at)
                if found and (not is_of_the_fleet(uid, query) or found == answer(port, of_one_page(query, one), at)):
                    assert_columns(panel, query, found, f"{uid}: {title}")
                    del open_questions[uid, title, query]
            return not open_questions

        def still_open() -> str:
            return "\n".join(f"{uid}: {title}: {query}" for uid, title, query in open_questions)

        wait_until(lambda: ask_what_is_open() or {title for _, title, _ in open_questions} <= OF_TROUBLE, still_open, deadline)
        counted = [(title, query) for uid, title, panel, query in questions() if uid == "gpu-fleet" and panel["type"] == "stat"]
        wait_until(
            lambda: {title: sum(answer(port, query).values()) for title, query in counted} == FIGURES,
            lambda: f"not {FIGURES}: {[(title, answer(port, query)) for title, query in counted]}",
            deadline,
        )
        for uid, dashboard in DASHBOARDS.items():
            for variable in variables(dashboard).values():
                if variable["type"] == "query":
                    assert_offered(port, variable, OF_PROMETHEUS[uid])
        with closing(sqlite3.connect(database, timeout=LIMIT_S)) as connection:
            connection.execute("ALTER TABLE gpu_latest RENAME TO elsewhere")
        wait_until(ask_what_is_open, still_open, deadline)


def of_one_page(query: str, target: str) -> str:
    return query.replace('job="gpu-aggregator"', f'job="gpu-aggregator", instance="{target}"')


def is_of_the_fleet(uid: str, query: str) -> bool:
    """Whether two pages have the same of it at one time, and one of them is enough."""
    return uid != "gpu-aggregator" and not re.search(r"rate\(|time\(\)|by \(instance\)", query)


def assert_columns(panel: Json, query: str, found: Mapping[tuple[tuple[str, str], ...], float], where: str) -> None:
    labels = {name for series in found for name, _ in series}
    legends = {name for target in panel["targets"] for name in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
    assert legends <= labels, where
    if panel["type"] == "table":
        named = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        assert labels <= named, f"{where}: a column without a head in {query}"


def assert_offered(port: int, variable: Json, values: Values) -> None:
    """What is chosen in these tests is among what the variable offers."""
    query = filled(variable["query"]["query"], values)
    if match := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
        offered = {dict(series).get(match[2]) for series in answer(port, match[1])}
    else:
        match = re.fullmatch(r"query_result\((.*)\)", query)
        assert match
        pattern = re.compile(variable["regex"].strip("/").replace("(?<", "(?P<"))
        lines = ["{" + ",".join(f'{name}="{value}"' for name, value in series) + "} 1 0" for series in answer(port, match[1])]
        taken = [pattern.search(line) for line in lines]
        assert all(taken), lines
        offered = {one["value"] for one in taken if one}
        assert "name of vm-busy · vm-busy" in {one["text"] for one in taken if one}
    chosen = values.get(variable["name"], offered)
    assert set([chosen] if isinstance(chosen, str) else chosen) <= offered
    assert offered


async def test_every_question_to_prometheus_is_answered_and_counts_a_card_once(short_dir: Path) -> None:
    program_or_skip("prometheus")
    async with FakeVmm(guests()).serving(short_dir / "vmm.sock"):
        await asyncio.to_thread(ask_all, short_dir)
