"""What the image says about this guest, in two JSON files: which application and instance it is, what it may show."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpuwire.pb.guest_api_pb2 import GuestInfo

log = logging.getLogger(__name__)

DISTRIBUTION = "cvm-gpu-telemetry"


@dataclass(frozen=True, slots=True)
class Instance:
    """Empty where the image does not say."""

    app_id: bytes = b""
    instance_id: bytes = b""


def read_instance_info(path: Path) -> Instance:
    """From dstack's .instance_info. A file that is broken or cannot be read is as none, with one warning."""
    try:
        return parse_instance_info(path.read_bytes())
    except FileNotFoundError:
        return Instance()
    except (OSError, ValueError) as error:
        log.warning("instance info ignored: file=%s reason=%s", path, _reason(error))
        return Instance()


def parse_instance_info(text: bytes) -> Instance:
    """From its JSON object, hexadecimal; a field that is missing or null is empty. Raises ValueError with the reason."""
    value = _parse_object(text)
    return Instance(app_id=_hex(value, "app_id"), instance_id=_hex(value, "instance_id"))


def guest_info(instance: Instance) -> GuestInfo:
    """What Info answers. What has no source here (certificate, TCB, device) stays empty."""
    return GuestInfo(version=version(DISTRIBUTION), app_id=instance.app_id, instance_id=instance.instance_id)


def read_public_sysinfo(path: Path) -> bool:
    """Whether the app-compose file lets others than the host see system and GPU figures.

    False, with one warning, where the file cannot be read or does not say clearly.
    """
    try:
        return parse_public_sysinfo(path.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("public_sysinfo is off: file=%s reason=%s", path, _reason(error))
        return False


def parse_public_sysinfo(text: bytes) -> bool:
    """The `public_sysinfo` key of the app-compose JSON, False where it is missing. Raises ValueError with the reason."""
    value = _parse_object(text).get("public_sysinfo", False)
    if not isinstance(value, bool):
        raise ValueError(f"public_sysinfo is {type(value).__name__}, neither true nor false")  # noqa: TRY004
    return value


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of failure for the caller
    return value


def _hex(value: dict[str, Any], key: str) -> bytes:
    text = value.get(key)
    if text is None:
        return b""
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise ValueError(f"{key} is not hexadecimal text") from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
