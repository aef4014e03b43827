"""How the guest is powered off. Whether it may be is the caller's."""

from __future__ import annotations

import asyncio
import logging

from gpuwire.errors import TelemetryError
from guest_agent.program import ProgramError, run_program

log = logging.getLogger(__name__)

LIMIT_S = 10.0


class ShutdownFailed(TelemetryError):
    """the guest did not begin to shut down, see its systemd's log"""

    word = "shutdown_failed"
    status = 502


async def shut_down(*, limit_s: float = LIMIT_S) -> None:
    """Returns once systemd has begun to power the guest off; raises ShutdownFailed."""
    log.info("powering off")
    try:
        await asyncio.to_thread(run_program, ["systemctl", "poweroff"], limit_s=limit_s, cap_bytes=0)
    except ProgramError as error:
        log.warning("power off failed: reason=%s", error)
        raise ShutdownFailed(str(error)) from None
