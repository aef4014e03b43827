"""The aggregator's command line: a wrong value is one line that names it, exit status 2, and nothing half-started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from gpuwire.address import TcpAddress
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.transport import listen_socket
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.needs import program_or_skip
from tests.processes import free_port, run_program

ANY_VMM = ["--vmm", "unix:/run/nobody.sock"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "Missing option '--vmm'"),
        (["--vmm", "nonsense"], "'nonsense' is not an address"),
        (["--vmm", "a=h:1", "--vmm", "a=h:2"], "the name 'a' is used twice"),
        (["--vmm", "a=localhost:1", "--vmm", "b=http://127.0.0.1:1/"], "a and b are one VMM, http://127.0.0.1:1: name it once"),
        (["--vmm", "unix:/run/a/../v.sock", "--vmm", "b=unix:/run/v.sock"], "are one VMM, unix:/run/v.sock: name it once"),
        (["--vmm", "ftp://foo"], "'ftp://foo' is not an address; expected unix:/path, http://HOST[:PORT][/PREFIX], https://"),
        (
            [*ANY_VMM, "--db", "mysql://x:secret@h/y"],
            "database URL 'mysql://x:***@h/y' names no database we know; allowed: sqlite",
        ),
        ([*ANY_VMM, "--db", "nonsense"], "database URL 'nonsense' cannot be read"),
        ([*ANY_VMM, "--db", "sqlite:////no/such/folder/h.db"], "/no/such/folder/h.db: there is no folder /no/such/folder"),
        ([*ANY_VMM, "--db", "postgresql://u:secret@127.0.0.1:1/d"], "postgresql://u:***@127.0.0.1:1/d"),
        ([*ANY_VMM, "--interval", "-1"], "'-1' is not a number of seconds above 0"),
        (
            [*ANY_VMM, "--interval", "0.9"],
            "--interval 0.9 is too short: at least 1, samples of a card that are nearer are taken",
        ),
        ([*ANY_VMM, "--interval", "60", "--stale-after", "69"], "at least the interval + 10 s = 70"),
        ([*ANY_VMM, "--listen", "0.0.0.0:8080"], "0.0.0.0:8080 can be reached from elsewhere: give --token-file"),
        ([*ANY_VMM, "--token-file", "/no/such/file"], "'/no/such/file' does not exist"),
        ([*ANY_VMM, "--token-file", "/dev/null", "--listen", "0.0.0.0:8080"], "/dev/null"),
        ([*ANY_VMM, "--tls-cert", __file__], "--tls-cert and --tls-key go together"),
        ([*ANY_VMM, "--spool", __file__], "test_cli.py' is a file"),
        (["--vmm", "a=http://h:1#token-file=/no/such/token"], "token file /no/such/token: No such file or directory"),
        (["--vmm", f"a=http://h:1#token-file={__file__}"], "expected one token of printable ASCII"),
        (["--vmm", "vsock:3:9080"], "a VMM is reached by unix:, tcp:, http: or https:"),
        ([*ANY_VMM, "--concurrency", "0"], "0 is not in the range x>=1"),
        ([*ANY_VMM, "--retention-raw", "7w"], "'7w' is not a time; allowed: such as 7d, 12h or 90m"),
        ([*ANY_VMM, "--retention-5m", "0d"], "'0d' is not a time; allowed"),
        ([*ANY_VMM, "--retention-raw", "59m"], "--retention-raw 59m is too short: at least 1h"),
        ([*ANY_VMM, "--retention-5m", "23h"], "--retention-5m 23h is too short: at least 1d"),
        ([*ANY_VMM, "--retention-raw", "91d"], "--retention-5m 90d is shorter than --retention-raw 91d: at least as long"),
        ([*ANY_VMM, "--retention-1h", "36h"], "--retention-1h 36h is shorter than --retention-5m 90d: at least as long"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], error: str) -> None:
    if "--db" not in arguments:
        arguments = [*arguments, "--db", f"sqlite:///{tmp_path}/h.db"]
    if "--listen" not in arguments:
        arguments = [*arguments, "--listen", f"127.0.0.1:{free_port()}"]
    result = run_program("gpu-aggregator", "serve", *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert error in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "secret" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["--upgrade"]])
def test_a_port_that_is_taken_changes_no_database(short_dir: Path, more: list[str]) -> None:
    with listen_socket(TcpAddress("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [*ANY_VMM, "--db", f"sqlite:///{short_dir}/h.db", "--listen", listen, *more]
        result = run_program("gpu-aggregator", "serve", *flags)

    assert (result.returncode, result.stderr) == (2, f"error: cannot listen on {listen}: address already in use\n")
    assert list(short_dir.iterdir()) == []


def test_a_database_that_cannot_be_used_leaves_no_socket(short_dir: Path) -> None:
    flags = [*ANY_VMM, "--db", f"sqlite:///{short_dir}/none/h.db", "--listen", f"unix:{short_dir}/page.sock"]
    result = run_program("gpu-aggregator", "serve", *flags)

    assert (result.returncode, "there is no folder" in result.stderr) == (2, True)
    assert list(short_dir.iterdir()) == []


async def run_poll(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(run_program, "gpu-aggregator", "poll", *arguments)
    return done.returncode, done.stdout, done.stderr


async def test_poll_prints_a_line_a_cvm_and_exits_0_when_all_answered(short_dir: Path, database_url: str) -> None:
    body = body_of(GpuSnapshot(gpus=(GpuDevice(index=0, uuid="GPU-1"),), sample_age_ms=1))
    guests = [
        Guest(running_vm("vm-1"), lambda: body),
        Guest(running_vm("vm-2")),
        Guest(running_vm("vm-3"), lambda: body_of(GpuSnapshot(error="NVIDIA driver is not loaded"))),
    ]
    async with FakeVmm(guests).serving(short_dir / "vmm.sock"):
        status, out, err = await run_poll("--db", database_url, "--vmm", f"host-1=unix:{short_dir}/vmm.sock")

    assert (status, [line for line in err.splitlines() if "upgraded" not in line]) == (0, [])
    assert [re.split(r"\s{2,}", line) for line in out.splitlines()] == [
        ["VMM", "VM", "NAME", "OUTCOME", "GPUS", "DETAIL"],
        ["host-1", "vm-1", "name of vm-1", "ok", "1"],
        ["host-1", "vm-2", "name of vm-2", "no_gpu", "0"],
        ["host-1", "vm-3", "name of vm-3", "nvml_error", "-", "NVIDIA driver is not loaded"],
    ]


async def test_poll_exits_1_when_one_did_not_answer_and_names_a_vmm_that_is_away(short_dir: Path) -> None:
    guests = [Guest(running_vm("vm-1")), Guest(running_vm("vm-2"), status=504, headers={})]
    async with FakeVmm(guests).serving(short_dir / "vmm.sock"):
        vmms = ["--vmm", f"here=unix:{short_dir}/vmm.sock", "--vmm", f"away=unix:{short_dir}/nobody.sock"]
        status, out, _ = await run_poll("--db", f"sqlite:///{short_dir}/h.db", *vmms, "--json")

    report = json.loads(out)
    assert status == 1
    found = {cvm["vm_id"]: (cvm["outcome"], cvm["gpus"]) for cvm in report["cvms"]}
    assert found == {"vm-1": ("no_gpu", []), "vm-2": ("timeout", None)}
    assert list(report["vmms_unreachable"]) == ["away"]


async def test_where_a_cvm_did_not_say_which_cards_it_has_there_is_a_dash(short_dir: Path) -> None:
    guests = [
        Guest(running_vm("vm-1"), status=504, headers={}),
        Guest(running_vm("vm-2"), status=409, headers={}),
        Guest(running_vm("vm-3"), body=lambda: b"\xff"),
    ]
    arguments = ["--db", f"sqlite:///{short_dir}/h.db", "--vmm", f"host-1=unix:{short_dir}/vmm.sock"]
    async with FakeVmm(guests).serving(short_dir / "vmm.sock"):
        _, out, _ = await run_poll(*arguments)
    _, away, _ = await run_poll(*arguments)

    told = [re.split(r"\s{2,}", line)[3:5] for line in out.splitlines()[1:]]
    assert told == [["timeout", "-"], ["schema_mismatch", "-"], ["bad_reply", "-"]]
    assert [re.split(r"\s{2,}", line)[3:5] for line in away.splitlines()[1:]] == [["vmm_unreachable", "-"]] * 4


async def test_one_file_is_for_serve_and_the_other_commands(short_dir: Path) -> None:
    config, vmm = short_dir / "aggregator.toml", f"unix:{short_dir}/vmm.sock"
    config.write_text(
        f'db = "sqlite:///{short_dir}/h.db"\nvmm = ["{vmm}"]\nlisten = "127.0.0.1:1"\nretention_raw = "2d"\nupgrade = true\n'
    )
    async with FakeVmm([Guest(running_vm("vm-1"))]).serving(short_dir / "vmm.sock"):
        status, out, _ = await run_poll("--config", str(config))
    assert (status, len(out.splitlines())) == (0, 2)
    assert run_program("gpu-aggregator", "report", "schema", "--config", str(config)).returncode == 0
    assert run_program("gpu-aggregator", "db", "check", "--config", str(config)).returncode == 0

    config.write_text("retention_row = '2d'\n")
    refused = run_program("gpu-aggregator", "db", "check", "--config", str(config))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "unknown key 'retention_row'; known are " in refused.stderr


async def test_poll_names_what_it_cannot_ask_and_exits_1(short_dir: Path) -> None:
    vmm = ["--db", f"sqlite:///{short_dir}/h.db", "--vmm", f"host-1=unix:{short_dir}/vmm.sock"]
    async with FakeVmm([Guest(running_vm("")), Guest(running_vm("vm-2"))]).serving(short_dir / "vmm.sock"):
        status, out, _ = await run_poll(*vmm)
        _, as_json, _ = await run_poll(*vmm, "--json")

    assert status == 1
    assert re.split(r"\s{2,}", out.splitlines()[-1]) == ["host-1", "-", "name of", "unaskable", "-", "its id is empty"]
    assert json.loads(as_json)["vms_unaskable"] == [
        {"vmm": "host-1", "vm_id": "", "vm_name": "name of ", "problem": "its id is empty"}
    ]


async def test_poll_marks_what_it_knows_of_a_vmm_that_is_away(short_dir: Path, database_url: str) -> None:
    arguments = ["--db", database_url, "--vmm", f"host-1=unix:{short_dir}/vmm.sock", "--json"]
    async with FakeVmm([Guest(running_vm("vm-1"))]).serving(short_dir / "vmm.sock"):
        await run_poll(*arguments)
    status, out, _ = await run_poll(*arguments)
    (cvm,) = json.loads(out)["cvms"]
    assert (status, cvm["vm_id"], cvm["outcome"], cvm["app_id"]) == (1, "vm-1", "vmm_unreachable", "app of vm-1")
    async with FakeVmm().serving(short_dir / "vmm.sock"):
        status, out, _ = await run_poll(*arguments)
        assert (status, [cvm["outcome"] for cvm in json.loads(out)["cvms"]]) == (0, ["not_running"])
        assert json.loads((await run_poll(*arguments))[1])["cvms"] == []


async def test_vms_that_are_not_running_do_not_count(short_dir: Path) -> None:
    stopped = running_vm("vm-2")
    stopped.status = "stopped"
    async with FakeVmm([Guest(running_vm("vm-1")), Guest(stopped)]).serving(short_dir / "vmm.sock"):
        status, out, _ = await run_poll("--db", f"sqlite:///{short_dir}/h.db", "--vmm", f"unix:{short_dir}/vmm.sock")

    assert (status, len(out.splitlines())) == (0, 2)


@pytest.mark.parametrize("name", ["gpu-aggregator", "gpu-host-proxy"])
def test_help_shows_a_vmms_address_as_it_is_typed(name: str) -> None:
    assert "ADDR[#token-file=FILE]" in run_program(name, "serve", "--help").stdout


def test_db_upgrade_fills_an_empty_database_and_leaves_a_current_one(database_url: str) -> None:
    first, second = (run_program("gpu-aggregator", "db", "upgrade", "--db", database_url) for _ in range(2))

    assert (first.returncode, second.returncode) == (0, 0)
    assert "has schema" in first.stdout
    assert first.stdout == second.stdout
    assert second.stderr == ""


async def test_who_had_a_card_is_known_from_the_database(short_dir: Path, database_url: str) -> None:
    card = body_of(GpuSnapshot(gpus=(GpuDevice(index=0, uuid="GPU-1", pci_bus_id="01:00.0"),), sample_age_ms=1))
    owner, liar = Guest(running_vm("owner"), lambda: card), Guest(running_vm("a-liar"), lambda: card)
    fleet = FakeVmm([owner])
    async with fleet.serving(short_dir / "vmm.sock"):
        arguments = ["--db", database_url, "--vmm", f"unix:{short_dir}/vmm.sock", "--json"]
        await run_poll(*arguments)
        fleet.guests.insert(0, liar)
        status, out, _ = await run_poll(*arguments)

    found = {cvm["vm_id"]: (cvm["outcome"], [gpu["uuid"] for gpu in cvm["gpus"]]) for cvm in json.loads(out)["cvms"]}
    assert (status, found) == (0, {"a-liar": ("contested", [""]), "owner": ("ok", ["GPU-1"])})


async def test_a_registered_vmm_is_found(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short_dir / "dstack-vmm").mkdir()
    registration = {"pid": os.getpid(), "address": "unix:./vmm.sock", "working_dir": str(short_dir), "node_name": "node-7"}
    (short_dir / "dstack-vmm/1.json").write_text(json.dumps(registration))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    async with FakeVmm([Guest(running_vm("vm-1"))]).serving(short_dir / "vmm.sock"):
        _, out, _ = await run_poll("--db", f"sqlite:///{short_dir}/h.db", "--discover", "--json")

    assert [(c["vmm"], c["outcome"]) for c in json.loads(out)["cvms"] if c["vm_id"] == "vm-1"] == [("node-7", "no_gpu")]


async def test_a_vmm_by_https_with_a_token(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl, cert, key = program_or_skip("openssl"), short_dir / "cert.pem", short_dir / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run([openssl, *made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    (short_dir / "token").write_text("a-secret\n")
    port = free_port()
    runner = web.AppRunner(FakeVmm([Guest(running_vm("vm-1"))], token="a-secret", host_call_status=200).web_app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    vmm = f"https://127.0.0.1:{port}#token-file={short_dir}/token"
    arguments = ["--db", f"sqlite:///{short_dir}/h.db", "--vmm", vmm, "--log-level", "debug"]
    refused = await run_poll(*arguments)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    found = await run_poll(*arguments)
    await runner.cleanup()

    assert refused[0] == 1
    assert "certificate verify failed" in refused[1]
    assert (found[0], f"https://127.0.0.1:{port}  vm-1  name of vm-1  no_gpu" in found[1]) == (0, True)
    assert "a-secret" not in "".join(map(str, (*refused, *found)))
