"""The command line of gpu-host-proxy."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpuwire import service
from gpuwire.address import TcpAddress, UnixAddress, parse_vmm_address
from gpuwire.schema import Policy, Unversioned
from host_proxy.app import serve
from host_proxy.listing import list_vms, vms_json, vms_table
from host_proxy.passthrough import GUEST_METHODS, Rules
from host_proxy.settings import Settings, SourceSettings
from host_proxy.upstream import Upstream

F = TypeVar("F", bound=Callable[..., None])
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class UpstreamParam(click.ParamType):  # type: ignore[type-arg]
    name = "ADDR[#token-file=FILE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            address, file = parse_vmm_address(value)
            return Upstream(address, Path(file).read_text().strip() if file else "")
        except (OSError, ValueError) as error:
            self.fail(str(error), param, ctx)


class ModeParam(click.ParamType):  # type: ignore[type-arg]
    """A file mode in octal digits, as chmod takes it."""

    name = "MODE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not re.fullmatch(r"0?[0-7]{3}", str(value)):
            self.fail(f"{value!r} is not a file mode such as 0660", param, ctx)
        return int(str(value), 8)


@click.group()
@click.version_option(package_name="cvm-gpu-telemetry")
def cli() -> None:
    """Passes calls on to the agents in this host's confidential VMs, byte for byte."""


def source_options(function: F) -> F:
    """The flags of SourceSettings."""
    for option in (
        click.option(
            "--guest-port",
            type=click.IntRange(1, 2**32 - 2),
            default=8000,
            show_default=True,
            help="vsock port of the agents in VMs that --qemu finds.",
        ),
        click.option(
            "--upstream",
            type=UpstreamParam(),
            metavar=UpstreamParam.name,
            help="dstack VMM: its VMs are known, its /prpc calls passed on, VMs without a known CID reached through it.",
        ),
        click.option("--qemu", is_flag=True, help="Find VMs among the running QEMU processes, in /proc."),
        click.option("--vms", type=FILE, help="TOML file that lists VMs of this host; read again when it changes."),
    ):
        function = option(function)
    return function


def source_settings(**flags: Any) -> SourceSettings:
    settings = SourceSettings(**flags)
    if not (settings.vms or settings.qemu or settings.upstream):
        raise click.UsageError("no source of VMs; give at least one of --vms, --qemu, --upstream")
    return settings


def _methods(ctx: click.Context, param: click.Parameter, value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(","))
    if unknown := names - set(GUEST_METHODS):
        raise click.BadParameter(f"{min(unknown)!r} is no guest method; known are {', '.join(GUEST_METHODS)}", ctx, param)
    return names


@service.command(cli, "serve", env="HOST_PROXY")
@click.option("--listen", type=service.ADDRESS, multiple=True, required=True, help="Where clients connect; may be repeated.")
@click.option("--grpc", type=service.ADDRESS, help="Where gRPC clients connect: unix: or tcp:.")
@source_options
@service.schema_options(unversioned=Unversioned.DENY)
@click.option(
    "--methods",
    default=",".join(name for name in GUEST_METHODS if name != "Shutdown"),
    show_default=True,
    callback=_methods,
    help="Guest calls that pass, comma-separated.",
)
@click.option(
    "--guest-timeout", type=service.SECONDS, default=8, show_default=True, help="Time that a guest has for a whole exchange."
)
@click.option(
    "--max-reply",
    type=click.IntRange(min=1024),
    default=4 * 1024 * 1024,
    show_default=True,
    help="Largest reply of a guest, in bytes.",
)
@click.option("--token-file", type=FILE, help="Tokens that TCP callers must send as Authorization: Bearer; one a line.")
@click.option("--tls-cert", type=FILE, help="Certificate chain for the TCP listeners, PEM; needs --tls-key.")
@click.option("--tls-key", type=FILE, help="Its key, PEM.")
@click.option("--socket-mode", type=ModeParam(), default="0660", show_default=True, help="Mode of the Unix sockets.")
@click.option("--socket-group", help="Group of the Unix sockets.  [default: the proxy's own]")
def serve_command(**flags: Any) -> None:
    """Serve the VMM socket's guest calls.

    In front of a dstack VMM every guest is unversioned: what you want there is --unversioned allow.
    """
    sources = source_settings(**{name: flags.pop(name) for name in ("vms", "qemu", "upstream", "guest_port")})
    rules = Rules(flags.pop("schema_policy"), flags.pop("unversioned"), flags.pop("methods"), flags.pop("guest_timeout"))
    tls = service.tls_files(flags.pop("tls_cert"), flags.pop("tls_key"))
    settings = Settings(sources=sources, rules=rules, tls=tls, **flags)
    service.refuse_open_tcp("--listen", settings.listen, settings.token_file)
    if settings.grpc is not None:
        if not isinstance(settings.grpc, UnixAddress | TcpAddress):
            raise click.UsageError(f"--grpc {settings.grpc}: gRPC is served on unix: and tcp: only")
        service.refuse_open_tcp("--grpc", [settings.grpc], settings.token_file)
    service.run(lambda stop: serve(settings, stop))


@service.command(cli, "vms", env="HOST_PROXY", log_level="warning")
@source_options
@service.schema_options(unversioned=Unversioned.DENY)
@click.option("--json", is_flag=True, help="Print JSON, with each card's root port and bus, instead of a table.")
def vms_command(json: bool, schema_policy: Policy, unversioned: Unversioned, **flags: Any) -> None:
    """List the VMs that would be served: how each is reached, where its cards sit, which schema its agent speaks.

    Each VM is asked once, for two seconds at most. Exit status 0 when all is well, 1 when a VM has a problem, such as a
    schema that serve would refuse, or a source is away.
    """
    found = asyncio.run(list_vms(source_settings(**flags), schema_policy, unversioned))
    click.echo(vms_json(found) if json else vms_table(found))
    sys.exit(1 if any(listed.problem for listed in found) else 0)


def main() -> None:
    service.run_cli(cli)


if __name__ == "__main__":
    main()
