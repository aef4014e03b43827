"""Powering off, with a fake systemctl."""

from __future__ import annotations

from pathlib import Path

import pytest

from guest_agent.power import ShutdownFailed, shut_down
from tests.fakes.program import put_first_on_path, write_program


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the fake systemctl. Each test writes one: the machine's own is never reached."""
    write_program(tmp_path, "systemctl", "exit 99")
    put_first_on_path(monkeypatch, tmp_path)
    return tmp_path


async def test_systemd_is_asked_to_power_off(folder: Path) -> None:
    write_program(folder, "systemctl", f'echo "$*" > {folder}/asked; echo noise')
    await shut_down()
    assert (folder / "asked").read_text() == "poweroff\n"


async def test_a_refusal_is_named(folder: Path) -> None:
    write_program(folder, "systemctl", "echo Access denied >&2; exit 4")
    with pytest.raises(ShutdownFailed) as caught:
        await shut_down()
    assert str(caught.value) == (
        "shutdown_failed: the guest did not begin to shut down, see its systemd's log: "
        "systemctl poweroff: status 4: Access denied"
    )
    assert caught.value.status == 502


async def test_a_guest_without_systemd_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "systemctl").unlink()
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ShutdownFailed, match="systemctl poweroff: No such file or directory"):
        await shut_down()


async def test_a_hung_systemctl_costs_its_limit(folder: Path) -> None:
    write_program(folder, "systemctl", "exec sleep 60")
    with pytest.raises(ShutdownFailed, match=r"not done within 0\.2 s"):
        await shut_down(limit_s=0.2)
