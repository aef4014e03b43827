"""The address grammar, each row in both directions, and what is refused."""

from __future__ import annotations

import pytest

from gpuwire.address import (
    UNIX_PATH_MAX,
    VSOCK_ANY,
    Address,
    HybridAddress,
    TcpAddress,
    UnixAddress,
    UrlAddress,
    VsockAddress,
    parse_address,
)

LONGEST = "/" + "p" * (UNIX_PATH_MAX - 1)


@pytest.mark.parametrize(
    ("text", "address", "canonical"),
    [
        ("unix:/run/a.sock", UnixAddress("/run/a.sock"), "="),
        ("unix:/run/a:1", UnixAddress("/run/a:1"), "="),
        (f"unix:{LONGEST}", UnixAddress(LONGEST), "="),
        ("vsock:3:8000", VsockAddress(3, 8000), "="),
        ("vsock:any:8000", VsockAddress(VSOCK_ANY, 8000), "="),
        ("vsock:4294967294:4294967294", VsockAddress(4294967294, 4294967294), "="),
        ("hybrid:/run/v.sock:8000", HybridAddress("/run/v.sock", 8000), "="),
        ("hybrid:/run/v:1:8000", HybridAddress("/run/v:1", 8000), "="),
        (f"hybrid:{LONGEST}:1", HybridAddress(LONGEST, 1), "="),
        ("tcp:localhost:80", TcpAddress("localhost", 80), "localhost:80"),
        ("host-1.example_2.org.:65535", TcpAddress("host-1.example_2.org.", 65535), "="),
        ("127.0.0.1:0", TcpAddress("127.0.0.1", 0), "="),
        ("[::1]:8080", TcpAddress("::1", 8080), "="),
        ("tcp:[::1]:8080", TcpAddress("::1", 8080), "[::1]:8080"),
        ("[fe80::1%eth0]:8080", TcpAddress("fe80::1%eth0", 8080), "="),
        ("http://vmm", UrlAddress("http", "vmm", 80, ""), "http://vmm:80"),
        ("https://vmm/", UrlAddress("https", "vmm", 443, ""), "https://vmm:443"),
        ("http://VMM.example:9080/a/b/", UrlAddress("http", "vmm.example", 9080, "/a/b"), "http://vmm.example:9080/a/b"),
        ("https://[2001:db8::1]:8443/p", UrlAddress("https", "2001:db8::1", 8443, "/p"), "="),
        ("http://[::1]", UrlAddress("http", "::1", 80, ""), "http://[::1]:80"),
    ],
)
def test_an_address_reads_and_writes_as_the_grammar_says(text: str, address: Address, canonical: str) -> None:
    assert parse_address(text) == address
    assert str(address) == (text if canonical == "=" else canonical)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unix:", "must be absolute"),
        ("unix:run/a.sock", "must be absolute"),
        ("unix:/a\0b", "holds a NUL"),
        ("hybrid:run/v.sock:8000", "must be absolute"),
        ("hybrid:/run/v.sock", "expected unix:/path"),
        ("hybrid:/run/v.sock:", "port '' is not a number"),
        ("hybrid:/run/v.sock:4294967295", "port '4294967295' is not a number from 0 to 4294967294"),
        ("vsock:8000", "expected unix:/path"),
        ("vsock::8000", "expected unix:/path"),
        ("vsock:any:any", "port 'any' is not a number"),
        ("vsock:4294967295:1", "CID '4294967295' is not a number from 0 to 4294967294"),
        ("vsock:3:4294967295", "port '4294967295' is not a number from 0 to 4294967294"),
        ("vsock:-1:1", "CID '-1' is not a number"),
        ("vsock:3:1:2", "CID '3:1' is not a number"),
        ("host", "expected unix:/path"),
        ("", "expected unix:/path"),
        (":80", "expected unix:/path"),
        ("tcp:80", "expected unix:/path"),
        ("host:", "port '' is not a number"),
        ("host:65536", "port '65536' is not a number from 0 to 65535"),
        ("host:-1", "port '-1' is not a number"),
        ("host:8o", "port '8o' is not a number"),
        ("host:\u0668\u0660", "is not a number"),
        ("host:" + "1" * 5000, "is not a number"),
        ("::1:80", "expected unix:/path"),
        ("[]:80", "cannot be empty"),
        ("[zz]:80", "At least 3 parts"),
        ("ho st:80", "expected unix:/path"),
        ("a..b:80", "expected unix:/path"),
        ("a" * 64 + ":80", "expected unix:/path"),
        ("/run/a.sock:80", "expected unix:/path"),
        ("ftp://host:80", "expected unix:/path"),
        ("ftp://host", "expected unix:/path"),
        ("http://", "is not a VMM's URL"),
        ("http:///prefix", "is not a VMM's URL"),
        ("http:vmm:80", "is not a VMM's URL"),
        ("http://vmm:65536", "is not a URL"),
        ("http://vmm:port", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://user:secret@vmm", "is not a VMM's URL"),
        ("http://:secret@vmm", "is not a VMM's URL"),
        ("http://vmm/?token=1", "is not a VMM's URL"),
        ("http://vmm/#part", "is not a VMM's URL"),
        ("http://vmm/a b", "is not a VMM's URL"),
        ("http://vmm/\r\nX: y", "is not a VMM's URL"),
        ("http://vmm/€", "is not a VMM's URL"),
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_line_that_names_it(text: str, why: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_address(text)
    line = str(refusal.value)
    assert repr(text) in line
    assert why in line
    assert "\n" not in line


@pytest.mark.parametrize("size", [108, 140])
@pytest.mark.parametrize("form", ["unix:{}", "hybrid:{}:1"])
def test_too_long_a_socket_path_is_refused_with_its_length(form: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"the socket path is {size} bytes long, at most 107 fit"):
        parse_address(form.format("/" + "p" * (size - 1)))


def test_a_socket_path_is_measured_in_bytes() -> None:
    assert parse_address("unix:/" + "é" * 53) == UnixAddress("/" + "é" * 53)
    with pytest.raises(ValueError, match="is 109 bytes long"):
        parse_address("unix:/" + "é" * 54)


def test_a_path_that_is_not_utf_8_on_the_command_line_is_an_address() -> None:
    assert parse_address("unix:/run/\udcff") == UnixAddress("/run/\udcff")
