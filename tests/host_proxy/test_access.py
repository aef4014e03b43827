"""Who may call over TCP: tokens and TLS, with the real program."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest

from tests.needs import program_or_skip
from tests.processes import free_port, running

SECRET = "a-secret-token"


@pytest.fixture
def config(short_dir: Path) -> Path:
    (short_dir / "vms.toml").write_text("vm = []")
    (short_dir / "tokens").write_text(f"# of the monitoring\n{SECRET}\nanother\n")
    return short_dir


def get(connection: HTTPConnection, target: str, authorization: str | None = None) -> tuple[int, bytes]:
    connection.request("GET", target, headers={} if authorization is None else {"Authorization": authorization})
    reply = connection.getresponse()
    return reply.status, reply.read()


@pytest.fixture
def port(config: Path) -> Iterator[int]:
    number = free_port()
    flags = ["--listen", f"127.0.0.1:{number}", "--listen", f"unix:{config}/p.sock", "--vms", f"{config}/vms.toml"]
    with running("gpu-host-proxy", [*flags, "--token-file", f"{config}/tokens"], config / "log"):
        yield number


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("", 401),
        (SECRET, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        (f"Basic {SECRET}", 401),
        (f"Bearer {SECRET}x", 401),
        (f"Bearer {SECRET}", 200),
        ("bearer another", 200),
        ("Bearer # of the monitoring", 401),
        ("Bearer \xff", 401),
    ],
)
def test_a_caller_over_tcp_needs_a_token(port: int, config: Path, authorization: str | None, status: int) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    for target in ("/prpc/Status", "/metrics", "/sd"):
        got, body = get(connection, target, authorization)
        assert got == status
        assert status == 200 or json.loads(body)["error"].startswith("unauthorized: ")
    connection.close()
    assert SECRET not in (config / "log").read_text()


def test_liveness_needs_no_token_and_a_unix_socket_neither(port: int, config: Path) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    assert get(connection, "/healthz")[0] == 200
    connection.close()
    local = HTTPConnection("localhost")
    local.sock = socket.socket(socket.AF_UNIX)
    local.sock.connect(str(config / "p.sock"))
    assert get(local, "/prpc/Status")[0] == 200
    local.close()


def test_tls_on_tcp(config: Path) -> None:
    openssl = program_or_skip("openssl")
    key, cert = config / "key.pem", config / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run([openssl, *made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    number = free_port()
    flags = ["--listen", f"127.0.0.1:{number}", "--vms", f"{config}/vms.toml", "--tls-cert", str(cert), "--tls-key", str(key)]
    with running("gpu-host-proxy", flags, config / "log"):
        connection = HTTPSConnection("127.0.0.1", number, context=ssl.create_default_context(cafile=str(cert)))
        assert get(connection, "/healthz")[0] == 200
        connection.close()
        plain = HTTPConnection("127.0.0.1", number, timeout=10)
        with pytest.raises(OSError):
            get(plain, "/healthz")
        plain.close()
