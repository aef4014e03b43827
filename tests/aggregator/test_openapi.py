"""The OpenAPI document, and the running program held against it: what it says may be asked is answered as it says, and what it
says may not is refused."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from aggregator import parameters
from aggregator.errors import WrongMethod
from aggregator.parameters import EXAMPLE_UUID
from aggregator.reports import reports
from aggregator.reports.api import MEDIA
from aggregator.reports.parameters import BY
from aggregator.routes import ERRORS, EXPORT, PREFIX, ROUTES, openapi
from aggregator.store import Store
from tests.aggregator.fleets import CVMS, HOSTS, LATER, UUIDS, M, fill
from tests.aggregator.test_access import strings
from tests.needs import program_or_skip
from tests.processes import free_port, running

TOKENS = "everything\nof-a read:app=app-a\n"
LIMIT_S = 12.0
SEED = 20261130


def test_the_document_is_valid_openapi() -> None:
    schema = schemathesis.openapi.from_dict(openapi(ROUTES))
    schema.validate()
    assert schema.raw_schema["openapi"] == "3.1.0"
    names = [result.ok().label for result in schema.get_all_operations()]
    assert names == [f"GET {PREFIX}{route.path}" for route in (*ROUTES, EXPORT)]


def test_each_parameter_says_what_it_is_and_its_examples_are_allowed() -> None:
    for route in (*ROUTES, EXPORT):
        described = openapi(ROUTES)["paths"][PREFIX + route.path]["get"]["parameters"]
        assert [one["name"] for one in described] == list(route.parameters.model_fields)
        for one in described:
            assert one["description"]
            assert one["in"] == ("path" if f"{{{one['name']}}}" in route.path else "query")
            assert one["required"] == route.parameters.model_fields[one["name"]].is_required()
            assert "null" not in str(one["schema"].get("type"))
            for example in one["schema"].get("examples", ()):
                text = ",".join(example) if isinstance(example, list) else example
                required = {"uuid": UUIDS[0], "vm_id": "a", "start": "0", "name": "idle"}
                given_ = {name: required[name] for name, of in route.parameters.model_fields.items() if of.is_required()}
                route.parameters.model_validate({**given_, one["name"]: text})


def test_every_answer_has_an_error_of_each_kind_described() -> None:
    for path, operations in openapi(ROUTES)["paths"].items():
        answers = operations["get"]["responses"]
        assert {"200", "400", "401", "403", "503", "504"} <= answers.keys(), path
        assert ("404" in answers) == ("{" in path or path == f"{PREFIX}/history")
        for status, answer in answers.items():
            assert status == "200" or list(answer["content"]) == ["application/problem+json"]


@contextmanager
def program(database_url: str, folder: Path) -> Iterator[str]:
    """The aggregator, serving a database with 40 minutes of a fleet until now; its address. No error is in its log then."""
    now_ms = time.time_ns() // 1_000_000
    with closing(Store(database_url)) as store:
        store.require_current()
        fill(store, now_ms - 40 * M, now_ms)
    (folder / "tokens").write_text(TOKENS)
    port = free_port()
    flags = ["--db", database_url, "--vmm", f"unix:{folder}/none.sock", "--listen", f"127.0.0.1:{port}"]
    with running("gpu-aggregator", [*flags, "--token-file", f"{folder}/tokens"], folder / "log"):
        yield f"http://127.0.0.1:{port}"
    log = (folder / "log").read_text()
    assert "Traceback" not in log
    assert " error " not in log
    assert "query too slow" not in log
    assert "everything" not in log
    assert "of-a" not in log


def ask_by_the_document(address: str, examples: int) -> int:
    """Each route that often as the document allows and as often as it forbids. Returns how many were asked."""
    session = requests.Session()
    session.headers["Authorization"] = "Bearer everything"
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json", headers=dict(session.headers))
    asked = 0
    for result in schema.get_all_operations():
        # Where there is nothing to ask there is nothing to ask wrongly.
        forbidden = [GenerationMode.NEGATIVE] if any(result.ok().iter_parameters()) else []
        for mode in (GenerationMode.POSITIVE, *forbidden):

            @seed(SEED)
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=result.ok().as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                nonlocal asked
                asked += 1
                started = time.monotonic()
                reply = case.call(session=session, headers=dict(session.headers))
                assert time.monotonic() - started < LIMIT_S, case.as_curl_command()
                case.validate_response(reply, checks=CHECKS)

            ask()
    session.close()
    return asked


CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


NASTY = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1e9",
        "NaN",
        "null",
        "true",
        "[]",
        "{}",
        "%",
        "%00",
        "\0",
        "\ud800",
        "\xff",
        "\u2028",
        "é",
        "\r\nX: y",
    ),
    *(
        "'",
        '"',
        "\\",
        "; DROP TABLE gpu; --",
        "' OR '1'='1",
        "$1",
        ":limit",
        "?",
        "*",
        "../../etc/passwd",
        "<script>",
        "{{7*7}}",
    ),
    *("9" * 400, "a" * 2000, "-" * 600, "GPU-", "GPU-" + "a" * 61, "MIG-" + "/" * 60, "gpu-1%", "gpu-", "GPU-1", "_"),
    *("1ms", "0s", "366d", "999999999d", "1s", "5m", "1h", "7d", "9223372036854775808", "-0", "00", "1_000", "\u0663"),
    *("1970-01-01T00:00:00Z", "2099-12-31T23:59:59.999Z", "0000-00-00T00:00:00Z", "9999-12-31T23:59:59+99:99", "4102444800"),
    *(
        "0",
        "1",
        "4102444799",
        "1.5",
        "253402300800",
        "1796047200000",
        "utilization_gpu",
        "temp);drop",
        "avg,avg",
        "p50,p95,p99",
    ),
    *(
        "WyIiLDBd",
        "WyIiLCIiXQ",
        "W10",
        "e30",
        "bnVsbA",
        "WyJcdTAwMDAiLDFd",
        "csv",
        "ndjson",
        "ok",
        "silent",
        "01:00.0",
        "3b:20.0",
    ),
)


def hostile(chance: random.Random, real: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """A method, a path and a query that nobody means well with."""

    def word() -> str:
        kind = chance.random()
        if kind < 0.45:
            return chance.choice(real)
        if kind < 0.9:
            return chance.choice(NASTY)
        return "".join(
            chr(chance.choice([chance.randrange(128), chance.randrange(0x3000)])) for _ in range(chance.randrange(30))
        )

    malice = chance.choice([0, 0, 0.2, 1])

    def value(name: str) -> str:
        return word() if chance.random() < malice else plausible(chance, name)

    route = chance.choice([*ROUTES, EXPORT])
    path = PREFIX + route.path
    fields = [name for name in route.parameters.model_fields if f"{{{name}}}" not in path]
    for name in set(route.parameters.model_fields) - set(fields):
        path = path.replace(f"{{{name}}}", quote(value(name), safe="", errors="surrogatepass"))
    if chance.random() < 0.05 * malice:
        path = "/" + "/".join(quote(word(), safe="/", errors="surrogatepass") for _ in range(3))
    names = chance.sample(fields, min(len(fields), chance.randrange(6)))
    if chance.random() < malice:
        names += [chance.choice([*fields, word()]) for _ in range(3)]
    return chance.choice(["GET"] * 20 + ["HEAD", "POST", "TRACE"]), path, [(name, value(name)) for name in names]


def plausible(chance: random.Random, name: str) -> str:
    cvm = chance.choice(CVMS)
    now = int(time.time())
    values: dict[str, list[str]] = {
        "uuid": list(UUIDS),
        "vmm": [cvm.vmm],
        "vm_id": [cvm.vm_id],
        "app_id": ["app-a", "app-b"],
        "bdf": ["01:00.0", "0000:02:00.0"],
        "host_bdf": list(HOSTS.values()),
        "start": [str(now - chance.randrange(10**4)), str(chance.randrange(now)), "0"],
        "end": [str(now - chance.randrange(10**3)), str(chance.randrange(2 * now))],
        "step": ["1s", "15s", "7m", "5m", "1h", "366d"],
        "fields": [",".join(parameters.FIELDS), "power_usage_mw"],
        "agg": [",".join(parameters.AGGREGATES), "last", "p99"],
        "limit": ["1", "2", "1000"],
        "state": list(parameters.STATES),
        "format": [*parameters.FORMATS, *MEDIA],
        "name": list(reports()),
        "since": ["1h", "7d", str(now - chance.randrange(10**5)), "1970-01-01T00:00:00Z"],
        "until": [str(now - chance.randrange(10**3)), str(chance.randrange(10**9, 2 * now))],
        "by": list(BY),
        "time_zone": ["UTC", "Asia/Kathmandu"],
        "below": ["1", "100"],
        "busy_above": ["0", "95"],
        "for": ["1s", "1h"],
    }
    return chance.choice(values.get(name, ["x"]))


def ask_with_malice(address: str, count: int, seed_: int) -> Counter[int]:
    """That many hostile requests, by each token in turn; returns how they were answered."""
    chance = random.Random(seed_)
    real = [*UUIDS, *(word for cvm in CVMS for word in (cvm.vmm, cvm.vm_id)), *HOSTS.values(), "app-a", "app-b"]
    hidden = {word for cvm in (*CVMS, LATER) if cvm.app_id != "app-a" for word in (cvm.vm_name, cvm.instance_id) if word}
    host, port = address.removeprefix("http://").split(":")
    answered: Counter[int] = Counter()
    with closing(HTTPConnection(host, int(port), timeout=LIMIT_S)) as connection:
        for number in range(count):
            method, path, query = hostile(chance, real)
            token = ("everything", "of-a")[number % 2]
            target = path + ("?" + urlencode(query, errors="surrogatepass") if query else "")
            connection.request(method, target, headers={"Authorization": f"Bearer {token}"})
            reply = connection.getresponse()
            body = reply.read().decode()
            answered[reply.status] += 1
            assert reply.status in (200, 400, 403, 404, 405, 409), (method, target, reply.status, body[:500])
            if reply.status >= 400 and method != "HEAD":
                assert reply.headers["Content-Type"] == "application/problem+json", (method, target)
                problem = json.loads(body)
                assert problem["status"] == reply.status
                assert len(body) < 10_000
            if token == "of-a" and reply.status == 200:
                found = (
                    {cell for row in csv.reader(io.StringIO(body)) for cell in row}
                    if "csv" in reply.headers["Content-Type"]
                    else {word for line in body.splitlines() for word in strings(json.loads(line))}
                )
                assert not found & hidden, target
                assert "app-b" not in found, target
    return answered


def test_the_program_answers_as_the_document_says(database_url: str, short_dir: Path) -> None:
    with program(database_url, short_dir) as address:
        assert ask_by_the_document(address, examples=4) > 50
        answered = ask_with_malice(address, 300, SEED)
        assert answered[200] > 30
        assert answered[400] > 100


DOC = Path(__file__).parents[2] / "docs/api.md"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_examples_in_the_docs_are_answered_as_they_say(database_url: str, short_dir: Path) -> None:
    curl = program_or_skip("curl")
    blocks = re.findall(r"^```sh\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    examples = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("curl ") for line in examples)
    assert {f"{PREFIX}{route.path}".partition("{")[0].rstrip("/") for route in (*ROUTES, EXPORT)} <= set(
        re.findall(r"/api/v1/[a-z]+", DOC.read_text())
    )
    with program(database_url, short_dir) as address:
        there = {"http://127.0.0.1:8080": address, EXAMPLE_UUID: UUIDS[0], "3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001": "gpu-10"}
        for example in examples:
            command, _, status = example.partition("  # ")
            for written, real in there.items():
                command = command.replace(written, real)
            command = command.replace("host_bdf=19:00.0", f"host_bdf={HOSTS[CVMS[0], 1]}").replace("$TOKEN", "everything")
            words = [curl, *shlex.split(command)[1:], "-sS", "-w", "\n%{http_code}"]
            words += [] if "Authorization" in command else ["-H", "Authorization: Bearer everything"]
            done = subprocess.run(words, cwd=short_dir, capture_output=True, text=True, timeout=30, check=True)
            body, _, answered = done.stdout.rpartition("\n")
            assert answered == (status or "200"), (example, body)


def test_every_code_that_may_be_answered_is_in_the_docs() -> None:
    table = dict(re.findall(r"^\| \d+ \| `(\w+)` \| (.*) \|$", DOC.read_text(), re.MULTILINE))
    errors = {*ERRORS, *(error for route in ROUTES for error in route.errors), WrongMethod}
    assert {error.word for error in errors} == table.keys()
