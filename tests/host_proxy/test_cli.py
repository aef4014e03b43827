"""The proxy's command line: a wrong value is one line that names it, exit status 2, and nothing half-started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_program, running


@pytest.mark.parametrize(
    ("listen", "vms", "more", "error"),
    [
        ("nonsense", "", [], "'nonsense' is not an address"),
        ("unix:{folder}/" + "x" * 120 + ".sock", "", [], "at most 107 fit"),
        ("0.0.0.0:8000", "", [], "0.0.0.0:8000 can be reached from elsewhere: give --token-file"),
        ("http://127.0.0.1:1", "", [], "cannot listen on http://127.0.0.1:1"),
        ("unix:{folder}/file", "", [], "a file that is no socket is in the way"),
        ("unix:{folder}/p.sock", "[[vm]]", [], "vms.toml: [[vm]] number 1: id is missing"),
        ("unix:{folder}/p.sock", "", ["--vms", "/no/such.toml"], "'/no/such.toml' does not exist"),
        ("unix:{folder}/p.sock", "", ["--methods", "Info,Nonsense"], "'Nonsense' is no guest method; known are Info"),
        ("unix:{folder}/p.sock", "", ["--schema-policy", "strict"], "'strict' is not one of 'lockstep', 'forward', 'off'"),
        ("unix:{folder}/p.sock", "", ["--grpc", "0.0.0.0:1"], "0.0.0.0:1 can be reached from elsewhere"),
        ("unix:{folder}/p.sock", "", ["--grpc", "vsock:any:1"], "gRPC is served on unix: and tcp: only"),
        ("unix:{folder}/p.sock", "", ["--tls-cert", "{folder}/file"], "--tls-cert and --tls-key go together"),
        ("127.0.0.1:0", "", ["--token-file", "{folder}/empty"], "empty: no token in it"),
        ("127.0.0.1:0", "", ["--tls-cert", "{folder}/file", "--tls-key", "{folder}/file"], "TLS certificate"),
        ("unix:{folder}/p.sock", "", ["--socket-mode", "rw"], "'rw' is not a file mode such as 0660"),
        ("unix:{folder}/p.sock", "", ["--socket-group", "no-such-group"], "no-such-group"),
        ("unix:{folder}/p.sock", "", ["--upstream", "vsock:1:2"], "a VMM is reached by unix:"),
        ("unix:{folder}/p.sock", "", ["--upstream", "unix:/x#token-file=/no/such"], "/no/such"),
        ("unix:{folder}/p.sock", "", ["--guest-timeout", "0"], "'0' is not a number of seconds above 0"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(short_dir: Path, listen: str, vms: str, more: list[str], error: str) -> None:
    (short_dir / "vms.toml").write_text(vms or "vm = []")
    (short_dir / "file").write_text("mine")
    (short_dir / "empty").write_text("# nothing\n")
    flags = ["--listen", listen, "--vms", "{folder}/vms.toml", *more]
    result = run_program("gpu-host-proxy", "serve", *(flag.format(folder=short_dir) for flag in flags))

    assert (result.returncode, result.stdout) == (2, "")
    assert error in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (short_dir / "file").read_text() == "mine"
    assert not (short_dir / "p.sock").exists()


def test_a_second_proxy_on_one_socket_is_refused_and_the_first_goes_on(short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text("vm = []")
    flags = ["--listen", f"unix:{short_dir}/p.sock", "--vms", f"{short_dir}/vms.toml"]
    with running("gpu-host-proxy", flags, short_dir / "log"):
        second = run_program("gpu-host-proxy", "serve", *flags)
        assert second.returncode == 2
        assert "in use by a running process" in second.stderr
        assert (short_dir / "p.sock").exists()
    assert not (short_dir / "p.sock").exists()


def test_settings_come_from_a_file_too(short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text("vm = []")
    config = short_dir / "proxy.toml"
    config.write_text(f'listen = ["unix:{short_dir}/p.sock"]\nvms = "{short_dir}/vms.toml"\nguest_timeout = 3\n')
    with running("gpu-host-proxy", ["--config", str(config)], short_dir / "log"):
        assert (short_dir / "p.sock").exists()


def test_one_file_is_for_serve_and_vms(short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text("vm = []")
    config = short_dir / "proxy.toml"
    config.write_text(f'listen = ["unix:{short_dir}/p.sock"]\nvms = "{short_dir}/vms.toml"\nguest_timeout = 3\n')
    listed = run_program("gpu-host-proxy", "vms", "--config", str(config))
    assert (listed.returncode, listed.stderr, len(listed.stdout.splitlines())) == (0, "", 1)

    config.write_text(f'listne = ["unix:{short_dir}/p.sock"]\nvms = "{short_dir}/vms.toml"\n')
    refused = run_program("gpu-host-proxy", "vms", "--config", str(config))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "unknown key 'listne'; known are grpc, guest_port, guest_timeout, json, listen, " in refused.stderr


def test_without_a_source_nothing_is_served() -> None:
    result = run_program("gpu-host-proxy", "serve", "--listen", "unix:/tmp/p.sock")

    assert (result.returncode, result.stderr) == (
        2,
        "error: no source of VMs; give at least one of --vms, --qemu, --upstream\n",
    )


def test_help_says_what_one_wants_in_front_of_a_dstack_vmm() -> None:
    assert "--unversioned allow" in run_program("gpu-host-proxy", "serve", "--help").stdout


def test_the_socket_has_the_mode_that_was_asked_for(short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text("vm = []")
    flags = ["--listen", f"unix:{short_dir}/p.sock", "--grpc", f"unix:{short_dir}/g.sock", "--vms", f"{short_dir}/vms.toml"]
    with running("gpu-host-proxy", [*flags, "--socket-mode", "0600"], short_dir / "log"):
        modes = [(short_dir / name).stat().st_mode & 0o777 for name in ("p.sock", "g.sock")]
    assert modes == [0o600, 0o600]
