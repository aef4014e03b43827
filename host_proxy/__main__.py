"""The command line of gpu-host-proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpuwire import service
from gpuwire.schema import Unversioned
from host_proxy.app import serve
from host_proxy.passthrough import GUEST_METHODS
from host_proxy.settings import Settings


@click.group()
@click.version_option(package_name="cvm-gpu-telemetry")
def cli() -> None:
    """Passes calls on to the agents in this host's confidential VMs, byte for byte."""


def _methods(ctx: click.Context, param: click.Parameter, value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(","))
    if unknown := names - set(GUEST_METHODS):
        raise click.BadParameter(f"{min(unknown)!r} is no guest method; known are {', '.join(GUEST_METHODS)}", ctx, param)
    return names


@service.command(cli, "serve", env="HOST_PROXY")
@click.option(
    "--listen",
    type=service.ADDRESS,
    multiple=True,
    required=True,
    callback=service.loopback_only,
    help="Where clients connect; may be repeated.",
)
@click.option(
    "--vms",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="TOML file that lists the VMs of this host; read again when it changes.",
)
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
def serve_command(**flags: Any) -> None:
    """Serve the VMM socket's guest calls."""
    settings = Settings(**flags)
    service.run(lambda stop: serve(settings, stop))


def main() -> None:
    service.run_cli(cli)


if __name__ == "__main__":
    main()
