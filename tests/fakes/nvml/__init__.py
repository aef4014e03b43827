"""The fake NVML: a real `libnvidia-ml.so.1`, built from fake_nvml.c, that answers what a text file says.

A process uses it by LD_LIBRARY_PATH (the folder that `build_fake_nvml` returns) and FAKE_NVML_FILE (the text file, read at
each nvmlInit; to change it under running readers write another and rename it over). The file has one `key = value` a line,
`#` starts a comment line, a later line wins over an earlier one. `devices = 2` alone gives two healthy H200 in CC mode.

    devices = 2                                number of devices (default 0)
    0.uuid = GPU-5f0c1e52-...                  text, at most 95 bytes: as it stands, but for \\n, \\\\ and \\xHH
    0.pci_bus_id = 00000000:01:00.0            text, at most 31 bytes
    0.utilization = 40 20                      GPU and memory, %
    0.memory = 150754820096 21474836480        total, used [, free [, reserved]], bytes; free is else total - used
    0.temperature = 35                         degrees C
    0.power = 310000                           mW
    0.device = error 15                        the lookup of the handle; has no value
    *.power = 70123                            all devices
    cc_feature = 1                             Confidential Computing on
    cc_ready = 1                               GPUs accept work
    init = error 18                            nvmlInit; has no value
    shutdown = error 999                       nvmlShutdown; has no value
    error_string = text                        what nvmlErrorString says of every code; `error 1` makes it return NULL
    delay_ms = 5                               each call takes so much longer

Numbers are raw unsigned 64 bits, cut to the width that NVML has for them: decimal, 0x..., or -1 for all ones. In place of
any value (and as the only ones where there is no value):

    error N      the call returns N          hang         the call never returns (signals end it)
    crash        SIGSEGV in the call         delay MS     the call takes so much longer; any of the others may follow

A line that is not understood makes nvmlInit fail with 999 and is named on stderr. Made by hand from nvml.h and from one
capture of an H200 (memory total); no other capture went in.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build_fake_nvml(directory: Path, without: Sequence[str] = ()) -> Path:
    """Compiles `directory`/libnvidia-ml.so.1 (0.1 s) and returns `directory`, for LD_LIBRARY_PATH.

    `without` names functions that the library lacks, as an old driver does. The compiler is $CC, else cc. Raises ValueError
    for a function that is not there to be left out, RuntimeError with the compiler's own words where there is no library.
    """
    source = SOURCE.read_text()
    for name in without:
        if f" {name}(" not in source and f"*{name}(" not in source:
            raise ValueError(f"{SOURCE.name} has no function {name}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    library = directory / "libnvidia-ml.so.1"
    removed = [f"-D{name}=without_{name}" for name in without]
    command = [*compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", *removed]
    try:
        subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"no C compiler {compiler[0]!r} for the fake NVML: install one or set CC") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the fake NVML does not compile:\n{error.stderr}") from None
    return directory


def fake_nvml_environment(directory: Path, control: Path) -> dict[str, str]:
    """This process's environment with the library in `directory` and the control file `control`."""
    return {**os.environ, "LD_LIBRARY_PATH": str(directory), "FAKE_NVML_FILE": str(control)}
