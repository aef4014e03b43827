"""What a token lets its holder see: everything, or some apps' cards, CVMs and history, and nothing that tells of others'."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aggregator.parameters import parse_time, rfc3339
from aggregator.reports import reports
from aggregator.reports.parameters import BY
from aggregator.routes import EXPORT, ROUTES
from aggregator.rows import Poll
from aggregator.store import Store
from gpuwire.access import EVERYTHING, Scope, Tokens
from gpuwire.errors import StartError, Unauthorized
from tests.aggregator.fleets import (
    CVMS,
    HOSTS,
    LATER,
    T0,
    TRAINER_10,
    UUIDS,
    Client,
    H,
    M,
    all_samples,
    expected_points,
    fill,
    forget_samples,
    roll_up,
    serving,
    spoken,
)
from tests.aggregator.test_app import aggregator
from tests.fakes.vmm import FakeVmm
from tests.processes import run_program, running

END = T0 + 2 * H
RANGE = {"start": rfc3339(T0), "end": rfc3339(END)}
TOKENS = """\
# the fleet's own
all-1
all-2 read

a-token read:app=app-a
b-token read:app=app-b
ab-token read:app=app-a read:app=app-b
c-token read:app=nobody
"""
APPS = {"a-token": {"app-a"}, "b-token": {"app-b"}, "ab-token": {"app-a", "app-b"}, "c-token": {"nobody"}}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# The file


def test_a_line_is_a_token_and_what_it_may_see(token_file: Path) -> None:
    tokens = Tokens(token_file, scopes=True)
    for token, apps in (("all-1", None), ("all-2", None), ("a-token", {"app-a"}), ("ab-token", {"app-a", "app-b"})):
        assert tokens.authorize(bearer(token)) == Scope(None if apps is None else frozenset(apps))
    for wrong in ("", "a", "read:app=app-a", "a-token read:app=app-a", "#"):
        with pytest.raises(Unauthorized):
            tokens.authorize(bearer(wrong))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("secret write", "an unknown scope behind the token; allowed: read, read:app=<app_id>"),
        ("secret read:app=", "an unknown scope"),
        ("secret read:apps=x", "an unknown scope"),
        ("secret READ", "an unknown scope"),
        ("secret read read:app=x", "read is everything: give either it or read:app=<app_id>"),
        ("first read:app=x", "this token stands in an earlier line with another scope"),
    ],
)
def test_a_scope_that_is_not_understood_stops_the_start_and_shows_no_token(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"first\n\n{line}\n")
    with pytest.raises(StartError) as refusal:
        Tokens(path, scopes=True)
    assert f"token file {path}: line 3: {why}" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_the_proxy_takes_no_scopes_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("fine\nsecret read\n")
    (tmp_path / "vms.toml").write_text("")
    flags = ["--listen", "127.0.0.1:0", "--vms", f"{tmp_path}/vms.toml", "--token-file", f"{tmp_path}/tokens"]
    done = run_program("gpu-host-proxy", "serve", *flags)
    assert done.returncode == 2
    assert "line 2: more than one word; expected a token alone" in done.stderr
    assert "secret" not in done.stderr


def test_a_token_twice_with_one_scope_is_one_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\none read\n")
    assert Tokens(tmp_path / "tokens", scopes=True).authorize(bearer("one")) == EVERYTHING


# Everything that belongs to one app, and what must not be told to the other

NOW = tuple(LATER if cvm is TRAINER_10 else cvm for cvm in CVMS)


@pytest.fixture
def filled(store: Store) -> Store:
    """Two hours of a fleet whose cards move between the apps, and whose details name others' CVMs and cards."""
    fill(store, T0, END)
    store.write(
        [
            Poll(cvm, END, "contested", detail=f"{UUIDS[0]} is held by {other.vm_id} of {other.vmm}")
            for cvm, other in zip(NOW, NOW[1:] + NOW[:1], strict=True)
        ]
    )
    return store


def strings(value: Any) -> set[str]:
    """Every text within."""
    if isinstance(value, dict):
        return set().union(*map(strings, value.values()))
    if isinstance(value, list):
        return set().union(*map(strings, value))
    return {value} if isinstance(value, str) else set()


def rows_of(export: str) -> Iterator[dict[str, Any]]:
    """Of either format."""
    return map(json.loads, export.splitlines()) if export[:1] == "{" else csv.DictReader(io.StringIO(export, newline=""))


async def everything(client: Client, token: str) -> dict[str, tuple[int, Any]]:
    """Each route asked in each way that says something."""
    asked: list[tuple[str, dict[str, str]]] = [("/gpus", {"limit": "1000"}), ("/cvms", {}), ("/summary", RANGE)]
    asked += [("/gpus", {name: value}) for name, value in (("vm_id", "vm-b"), ("app_id", "app-b"), ("vmm", "rack2"))]
    asked += [("/gpus", {"uuid": uuid}) for uuid in UUIDS]
    asked += [("/cvms", {name: value}) for name, value in (("app_id", "app-a"), ("vmm", "rack1"))]
    for uuid in UUIDS:
        asked += [(f"/gpus/{uuid}", {}), (f"/gpus/{uuid}/history", {**RANGE, "agg": "avg,last,count"})]
        asked += [(f"/gpus/{uuid}/history", {**RANGE, "agg": "p50"}), (f"/gpus/{uuid}/history", {**RANGE, "step": "1h"})]
        asked += [("/export", {"start": "0", "format": "ndjson", "uuid": uuid})]
    asked += [("/heatmap", {}), ("/heatmap", {**RANGE, "step": "5m"})]
    asked.append(("/reports", {}))
    for name, report in reports().items():
        since = {"since": "1970-01-01T00:00:00Z"} if "by" not in report.parameters else {"since": "1h"}
        asked += [(f"/reports/{name}", since), (f"/reports/{name}", {**since, "app_id": "app-b"})]
        asked += [(f"/reports/{name}", {**since, "by": by}) for by in BY if "by" in report.parameters]
    for cvm in CVMS:
        asked += [(f"/cvms/{cvm.vm_id}", {"vmm": cvm.vmm}), (f"/cvms/{cvm.vm_id}", {})]
        for slot in (1, 2):
            asked.append(("/history", {**RANGE, "vm_id": cvm.vm_id, "vmm": cvm.vmm, "bdf": f"0{slot}:00.0"}))
            asked.append(("/history", {**RANGE, "vmm": cvm.vmm, "host_bdf": HOSTS[cvm, slot]}))
        asked.append(("/export", {"start": "0", "format": "ndjson", "vm_id": cvm.vm_id}))
    asked += [("/export", {"start": "0", "format": name}) for name in ("csv", "ndjson")]
    answers = {}
    for path, query in asked:
        answers[f"{path} {query}"] = await client.get(f"/api/v1{path}", query, **bearer(token))
    routes = {path.replace(UUIDS[0], "{uuid}").replace("vm-b", "{vm_id}").replace("idle", "{name}") for path, _ in asked}
    assert {route.path for route in (*ROUTES, EXPORT)} <= routes, "a route was added: ask it here too"
    return answers


async def test_no_route_tells_an_app_anything_of_another(filled: Store, database_url: str, token_file: Path) -> None:
    samples = all_samples(database_url)
    roll_up(filled, T0 + 90 * M)
    async with serving(filled, END, token_file) as client:
        for token, apps in APPS.items():
            answers = await everything(client, token)
            theirs = {(s["vmm"], s["vm_id"]) for s in samples if s["app_id"] in apps}
            others = [cvm for cvm in (*CVMS, LATER) if cvm.app_id not in apps]
            hidden = {"vm_name": {cvm.vm_name for cvm in others}}
            hidden["app"] = {cvm.app_id for cvm in others if cvm.app_id}
            hidden["instance"] = {cvm.instance_id for cvm in others if cvm.instance_id}
            hidden["uuid"] = set(UUIDS) - {s["uuid"] for s in samples if s["app_id"] in apps}
            secrets = {word for words in hidden.values() for word in words}
            for question, (status, body) in answers.items():
                if status != 200:
                    assert (status, body["code"]) in ((404, "not_found"), (409, "ambiguous")), (question, body)
                    continue
                rows = list(rows_of(body)) if isinstance(body, str) else body
                assert not strings(rows) & secrets, (token, question)
                assert "is held by" not in json.dumps(rows), question
                for row in rows if isinstance(rows, list) else ():
                    assert (row["vmm"], row["vm_id"]) in theirs


async def test_an_app_sees_of_a_card_what_it_did_in_its_own_cvms(filled: Store, database_url: str, token_file: Path) -> None:
    samples = all_samples(database_url)
    moved = [uuid for uuid in UUIDS if {"app-a", "app-b"} <= {s["app_id"] for s in samples if s["uuid"] == uuid}]
    assert moved, "the fleet has no card that was in both apps"
    async with serving(filled, END, token_file) as client:
        for rolled in (False, True):
            if rolled:
                roll_up(filled, T0 + 100 * M)
            for token, apps in APPS.items():
                for uuid in UUIDS:
                    own = [s for s in samples if s["uuid"] == uuid and s["app_id"] in apps]
                    query = {**RANGE, "step": "5m", "fields": "temperature_c", "agg": "avg,max,last,count"}
                    status, history = await client.get(f"/api/v1/gpus/{uuid}/history", query, **bearer(token))
                    assert status == (200 if own else 404)
                    if own:
                        agg = ["avg", "max", "last", "count"]
                        assert history["points"] == expected_points(own, T0, END, 5 * M, ["temperature_c"], agg)
                        one = await client.ok(f"/api/v1/gpus/{uuid}", **bearer(token))
                        assert {stay["app_id"] for stay in one["tenancy"]} <= apps
                        assert parse_time(one["first_seen"]) <= own[0]["sampled_at_ms"]
                        listed = (await client.ok("/api/v1/gpus", {"uuid": uuid}, **bearer(token)))["gpus"]
                        for card in listed:
                            assert (card["first_seen"], card["last_seen"]) == (one["first_seen"], one["last_seen"])
                            assert card["first_seen"] == one["tenancy"][-1]["first_seen"]
                        last = max((s for s in samples if s["uuid"] == uuid), key=lambda s: s["sampled_at_ms"])
                        assert (one["latest"] is None) == (last["app_id"] not in apps)
                exported = await client.ok("/api/v1/export", {"start": "0", "format": "ndjson"}, **bearer(token))
                assert len(exported.splitlines()) == sum(s["app_id"] in apps for s in samples)


async def test_percentiles_of_an_app_are_of_its_own_time_only(filled: Store, database_url: str, token_file: Path) -> None:
    busy = {row["app_id"]: row for row in spoken(database_url)}
    assert {"app-a", "app-b"} <= busy.keys()
    roll_up(filled, T0 + 80 * M)
    forget_samples(filled, T0 + 6 * M)
    async with serving(filled, END, token_file) as client:
        both = {}
        for token in ("a-token", "b-token", "ab-token"):
            query = {**RANGE, "step": "2h", "agg": "p50,count", "fields": "utilization_gpu"}
            found = [await client.get(f"/api/v1/gpus/{uuid}/history", query, **bearer(token)) for uuid in UUIDS]
            both[token] = sum(
                point["utilization_gpu"]["count"] for status, reply in found if status == 200 for point in reply["points"]
            )
            assert any(reply["percentiles"]["from"] == "histogram" for status, reply in found if status == 200)
        assert both["a-token"] + both["b-token"] == both["ab-token"] > both["a-token"] > 0


async def test_summary_of_a_token_is_its_apps_own(filled: Store, database_url: str, token_file: Path) -> None:
    rows = spoken(database_url)
    roll_up(filled, T0 + 75 * M)
    async with serving(filled, END, token_file) as client:
        whole = await client.ok("/api/v1/summary", RANGE, **bearer("all-1"))
        for token, apps in APPS.items():
            found = await client.ok("/api/v1/summary", RANGE, **bearer(token))
            assert found["apps"] == sorted(apps)
            own = [row for row in rows if row["app_id"] in apps and T0 <= row["sampled_at_ms"] < END]
            assert found["range"]["gpu_hours"] == sum(row["spoken_ms"] for row in own) / 3_600_000
            cards = await client.ok("/api/v1/gpus", {"limit": "1000"}, **bearer(token))
            assert sum(found["now"]["gpus"].values()) == len(cards["gpus"]) < sum(whole["now"]["gpus"].values())
            cvms = await client.ok("/api/v1/cvms", **bearer(token))
            assert sum(found["now"]["cvms"].values()) == len(cvms["cvms"]) < sum(whole["now"]["cvms"].values())
    assert whole["apps"] is None
    assert whole["range"]["gpu_hours"] == sum(r["spoken_ms"] for r in rows if T0 <= r["sampled_at_ms"] < END) / 3_600_000


async def test_a_cursor_of_another_token_opens_nothing(filled: Store, token_file: Path) -> None:
    async with serving(filled, END, token_file) as client:
        page = await client.ok("/api/v1/gpus", {"limit": "1"}, **bearer("all-1"))
        rest = await client.ok("/api/v1/gpus", {"cursor": page["next_cursor"]}, **bearer("a-token"))
        assert {card["app_id"] for card in rest["gpus"]} <= {"app-a"}


async def test_without_a_token_or_with_a_wrong_one_nothing_is_told(filled: Store, token_file: Path) -> None:
    async with serving(filled, END, token_file) as client:
        for path in ("/api/v1/gpus", "/api/v1/nothing", "/openapi.json", "/elsewhere", "/api/v1/export?start=0"):
            for headers in ({}, bearer("wrong"), {"Authorization": "Basic all-1"}, bearer("\xff")):
                async with client.reply(path, **headers) as reply:
                    problem = await reply.json(content_type="application/problem+json")
                    assert (reply.status, problem["code"]) == (401, "unauthorized")
                    assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert (await client.get("/api/v1/gpus?token=all-1"))[0] == 401


async def test_what_is_wrong_with_the_database_is_not_for_every_token(token_file: Path) -> None:
    store = Store("postgresql://nobody@/hidden-name?host=/nonexistent")
    async with serving(store, T0, token_file) as client:
        assert "hidden-name" in (await client.get("/api/v1/gpus", **bearer("all-1")))[1]["detail"]
        status, problem = await client.get("/api/v1/gpus", **bearer("a-token"))
        assert (status, problem["code"]) == (503, "database")
        assert "hidden-name" not in problem["detail"]
    store.close()


# The whole program


async def test_pages_of_the_whole_fleet_are_for_who_may_see_it(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (short_dir / "tokens").write_text(TOKENS)
    async with FakeVmm().serving(short_dir / "vmm.sock"), aggregator(short_dir, token_file=short_dir / "tokens") as client:
        for target in ("/notices", "/metrics", "/readyz"):
            status, body = await client.get(target, **bearer("a-token"))
            assert (status, json.loads(body)["code"]) == (403, "forbidden")
            assert (await client.get(target, **bearer("all-2")))[0] == 200
        for target in ("/api/v1/gpus", "/api/v1/summary", "/openapi.json", "/healthz"):
            assert (await client.get(target, **bearer("a-token")))[0] == 200
        assert (await client.get("/healthz"))[0] == 200
    assert "a-token" not in caplog.text


async def test_a_unix_socket_needs_no_token(short_dir: Path) -> None:
    (short_dir / "tokens").write_text(TOKENS)
    flags = [
        "--db",
        f"sqlite:///{short_dir}/h.db",
        "--vmm",
        f"unix:{short_dir}/vmm.sock",
        "--listen",
        f"unix:{short_dir}/a.sock",
    ]
    with running("gpu-aggregator", [*flags, "--token-file", f"{short_dir}/tokens"], short_dir / "log"):
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{short_dir}/a.sock")) as session,
            session.get("http://aggregator/api/v1/gpus") as reply,
        ):
            assert (reply.status, await reply.json()) == (200, {"gpus": [], "next_cursor": None})
