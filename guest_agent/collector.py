"""One GPU sample: a short-lived process that asks NVML once, prints one JSON line and ends.

The agent starts it by `command()`, so that a call which hangs or crashes in the driver costs a child and not the agent. It
stands alone, under `python -I -S -E`: what is imported here is paid for at every sample, hence ctypes, nothing else, and a
JSON writer of its own. Ages, caching and deadlines are the sampler's. Tests compare the bounds and the field names with
gpuwire/device.py, and what is taken from nvml.h with nvidia-ml-py.
"""

from __future__ import annotations

import os  # ctypes has imported it already
import sys
from ctypes import CDLL, Structure, byref, c_char, c_char_p, c_uint, c_ulonglong, c_void_p, sizeof

TYPE_CHECKING = False  # typing's own costs an import; type checkers take this name for true
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# The largest value that can be true. NVML's sentinels and wrapped subtractions lie far above.
UPPER = {
    "utilization_gpu": 100,
    "utilization_memory": 100,
    "memory_total_bytes": 2**48,
    "memory_used_bytes": 2**48,
    "memory_free_bytes": 2**48,
    "temperature_c": 200,
    "power_usage_mw": 10_000_000,
}
MAX_GPUS = 256  # a garbage count must not become as many devices

# nvml.h
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_TEMPERATURE_GPU = 0
NVML_DEVICE_UUID_V2_BUFFER_SIZE = 96


class Utilization(Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Memory(Structure):
    """nvmlMemory_v2_t, in bytes."""

    _fields_ = (("version", c_uint), *((part, c_ulonglong) for part in ("total", "reserved", "free", "used")))


class PciInfo(Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", c_char * 16),
        *((part, c_uint) for part in ("domain", "bus", "device", "pciDeviceId", "pciSubSystemId")),
        ("busId", c_char * 32),
    )


class ConfComputeState(Structure):
    """nvmlConfComputeSystemState_t."""

    _fields_ = (("environment", c_uint), ("ccFeature", c_uint), ("devToolsMode", c_uint))


NVML_MEMORY_V2 = sizeof(Memory) | 2 << 24


class QueryError(Exception):
    """What NVML did not answer. The message is the reason, in NVML's words where it has any."""


class Nvml:
    """The driver's library, with each call checked. Raises OSError where there is none."""

    def __init__(self) -> None:
        self.library = CDLL("libnvidia-ml.so.1")

    def __enter__(self) -> Nvml:
        self.call("nvmlInit_v2")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("nvmlShutdown")
        except QueryError as error:
            log(f"warning: nvml shutdown failed: reason={error}")

    def call(self, name: str, *arguments: Any) -> None:
        """Raises QueryError unless `name` exists and succeeds: an old driver's missing symbol is one more failed query."""
        function = getattr(self.library, name, None)
        code = function(*arguments) if function else NVML_ERROR_FUNCTION_NOT_FOUND
        if code:
            raise QueryError(self.reason(code))

    def reason(self, code: int) -> str:
        function = getattr(self.library, "nvmlErrorString", None)
        if function:
            function.restype = c_char_p
            text = decode(function(code) or b"")
            if text:
                return text
        return f"NVML error {code}"


def decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def read_uuid(nvml: Nvml, device: c_void_p) -> tuple[str]:
    uuid = (c_char * NVML_DEVICE_UUID_V2_BUFFER_SIZE)()
    nvml.call("nvmlDeviceGetUUID", device, uuid, sizeof(uuid))
    return (decode(uuid.value),)


def read_pci_bus_id(nvml: Nvml, device: c_void_p) -> tuple[str]:
    pci = PciInfo()
    nvml.call("nvmlDeviceGetPciInfo_v3", device, byref(pci))
    return (decode(pci.busId),)


def read_utilization(nvml: Nvml, device: c_void_p) -> tuple[int, int]:
    rates = Utilization()
    nvml.call("nvmlDeviceGetUtilizationRates", device, byref(rates))
    return rates.gpu, rates.memory


def read_memory(nvml: Nvml, device: c_void_p) -> tuple[int, int, int]:
    # v2: its `used` leaves out what the driver reserves, which v1 counts in; so nvidia-smi shows the same figure.
    memory = Memory(version=NVML_MEMORY_V2)
    nvml.call("nvmlDeviceGetMemoryInfo_v2", device, byref(memory))
    return memory.total, memory.used, memory.free


def read_temperature(nvml: Nvml, device: c_void_p) -> tuple[int]:
    celsius = c_uint()
    nvml.call("nvmlDeviceGetTemperature", device, NVML_TEMPERATURE_GPU, byref(celsius))
    return (celsius.value,)


def read_power(nvml: Nvml, device: c_void_p) -> tuple[int]:
    milliwatts = c_uint()
    nvml.call("nvmlDeviceGetPowerUsage", device, byref(milliwatts))
    return (milliwatts.value,)


# Query (its name in `errors`), the GpuDevice fields that it fills, its reader, which returns their values in that order.
READERS: tuple[tuple[str, tuple[str, ...], Callable[[Nvml, c_void_p], tuple[Any, ...]]], ...] = (
    ("uuid", ("uuid",), read_uuid),
    ("pci_bus_id", ("pci_bus_id",), read_pci_bus_id),
    ("utilization", ("utilization_gpu", "utilization_memory"), read_utilization),
    ("memory", ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes"), read_memory),
    ("temperature", ("temperature_c",), read_temperature),
    ("power", ("power_usage_mw",), read_power),
)


def read_cc_ready(nvml: Nvml) -> int:
    ready = c_uint()
    nvml.call("nvmlSystemGetConfComputeGpusReadyState", byref(ready))
    return ready.value


def read_cc_enabled(nvml: Nvml) -> int:
    state = ConfComputeState()
    nvml.call("nvmlSystemGetConfComputeState", byref(state))
    return int(state.ccFeature)


CC_READERS: tuple[tuple[str, Callable[[Nvml], int]], ...] = (
    ("cc_ready", read_cc_ready),
    ("cc_enabled", read_cc_enabled),
)


def out_of_range(reading: dict[str, Any]) -> dict[str, int]:
    """Those of `reading` that cannot be true: above their bound, or memory above the card's total."""
    bound = UPPER["memory_total_bytes"]
    total = min(bound, reading.get("memory_total_bytes", bound))  # a garbage total limits nothing
    limits = UPPER | {"memory_used_bytes": total, "memory_free_bytes": total}
    return {field: value for field, value in reading.items() if field in limits and value > limits[field]}


def sample_device(nvml: Nvml, index: int) -> dict[str, Any]:
    """One GpuDevice of wire.md. Never raises for what the card does: that is an `errors` entry."""
    errors: list[str] = []
    device: dict[str, Any] = {"index": index, "uuid": "", "pci_bus_id": "", **dict.fromkeys(UPPER), "errors": errors}
    handle = c_void_p()
    try:
        nvml.call("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
    except QueryError as error:
        errors.append(f"device: {error}")
        return device
    for query, fields, read in READERS:
        try:
            reading = dict(zip(fields, read(nvml, handle), strict=True))
        except QueryError as error:
            errors.append(f"{query}: {error}")
            continue
        if "" in reading.values():
            errors.append(f"{query}: empty answer")
        bad = out_of_range(reading)
        if bad:
            values = ", ".join(dict.fromkeys(str(value) for value in bad.values()))
            errors.append(f"{query}: out of range ({values})")
        if "memory_used_bytes" in bad:
            bad["memory_free_bytes"] = reading["memory_free_bytes"]  # each is computed from the other
        device.update((field, value) for field, value in reading.items() if field not in bad)
    return device


def count_devices(nvml: Nvml) -> int:
    count = c_uint()
    nvml.call("nvmlDeviceGetCount_v2", byref(count))
    if count.value > MAX_GPUS:
        raise QueryError(f"out of range ({count.value})")
    return count.value


def sample_cc(nvml: Nvml) -> dict[str, bool | None]:
    """The system-wide Confidential Computing state; None for what NVML does not say, with a line on stderr."""
    states: dict[str, bool | None] = {}
    for field, read in CC_READERS:
        try:
            value = read(nvml)
            if value > 1:
                raise QueryError(f"out of range ({value})")
        except QueryError as error:
            log(f"warning: cc query failed: field={field} reason={error}")
            states[field] = None
        else:
            states[field] = bool(value)
    return states


def sample() -> dict[str, Any]:
    """One GpuInfoResponse of wire.md in its JSON shape. A failure is in `error`, and a warning on stderr too."""
    gpus: list[dict[str, Any]] = []
    response: dict[str, Any] = {"gpus": gpus, "error": "", "cc_ready": None, "cc_enabled": None, "sample_age_ms": None}
    step = "failed to initialize NVML"
    try:
        with Nvml() as nvml:
            step = "failed to get NVML GPU count"
            gpus.extend(sample_device(nvml, index) for index in range(count_devices(nvml)))
            response.update(sample_cc(nvml))
    except (OSError, QueryError) as error:
        response["error"] = f"{step}: {' '.join(str(error).split())}"
        log(f"warning: nvml unavailable: error={response['error']}")
    return response


def to_json(value: Any) -> str:
    """`value` as JSON in ASCII on one line. Half a surrogate pair, which no UTF-8 can carry on, becomes U+FFFD."""
    if isinstance(value, dict):
        return "{" + ",".join([f"{to_json(name)}:{to_json(item)}" for name, item in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join([to_json(item) for item in value]) + "]"
    if isinstance(value, str):
        return '"' + "".join([escape(char) for char in value]) + '"'
    return "null" if value is None else str(value).lower()


def escape(char: str) -> str:
    if " " <= char <= "~":
        return "\\" + char if char in '"\\' else char
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:
        code = 0xFFFD
    if code > 0xFFFF:
        return f"\\u{0xD7C0 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"


def printable(text: str) -> str:
    """`text` for any terminal or log: one line of ASCII, and no control sequence that a card made up."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def to_table(response: dict[str, Any]) -> str:
    """`response` for people: a table of at most 100 columns, below it a line for each UUID and each error."""
    if response["error"]:
        return f"error: {printable(response['error'])}"

    def number(value: int | None, unit: int, digits: int) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    columns = (
        ("GPU %", "utilization_gpu", 1, 0),
        ("Memory %", "utilization_memory", 1, 0),
        ("Used GiB", "memory_used_bytes", 2**30, 1),
        ("Free GiB", "memory_free_bytes", 2**30, 1),
        ("Total GiB", "memory_total_bytes", 2**30, 1),
        ("Temp C", "temperature_c", 1, 0),
        ("Power W", "power_usage_mw", 1000, 1),
    )
    rows = [["GPU", f"{'PCI address':16}", *(head for head, *_ in columns)]]
    notes = []
    for gpu in response["gpus"]:
        place = printable(gpu["pci_bus_id"] or "-")[:16].ljust(16)
        rows.append([str(gpu["index"]), place, *(number(gpu[field], *form) for _, field, *form in columns)])
        notes += [f"GPU {gpu['index']}: {printable(note)}" for note in (gpu["uuid"] or "no UUID", *gpu["errors"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    enabled, ready = ({None: "unknown", False: "no", True: "yes"}[response[key]] for key in ("cc_enabled", "cc_ready"))
    cc = f"Confidential Computing enabled: {enabled}, GPUs ready: {ready}"
    return "\n".join([cc, "", *table, "", *notes] if notes else [cc, "", "no NVIDIA GPUs"])


def log(text: str) -> None:
    try:  # noqa: SIM105 - contextlib is one more import
        sys.stderr.write(f"{printable(text)}\n")
    except (AttributeError, OSError):
        pass  # stderr is closed or its reader gone: not worth the sample


def main(argv: list[str]) -> int:
    """Exit status: 0 whenever something was printed, be it that NVML is unavailable; 2 for a wrong command line."""
    if argv not in ([], ["--pretty"]):
        log(f"error: wrong arguments: got={' '.join(argv)} allowed=--pretty")
        return 2
    text = to_table(sample()) if argv else to_json(sample())
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        log(f"error: output failed: error={error}")
        return 1
    return 0


def command() -> list[str]:
    """How to start this module: imported, since Python keeps no bytecode of a script (6 of 23 ms, 1 of 10 MiB)."""
    code = "import sys; sys.path.append(sys.argv.pop(1)); import collector; collector.run()"
    return [sys.executable, "-I", "-S", "-E", "-c", code, __file__.rpartition("/")[0]]


def run() -> NoReturn:
    """`main` for a process that does nothing else: all is flushed by now, and an orderly teardown costs 2 ms."""
    os._exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
