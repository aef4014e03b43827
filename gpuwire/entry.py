"""Where the console scripts begin: loads a program, or says which extra of the wheel it lacks. The rooms are named as text, so
that whoever imports this module imports none of them."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

OURS = {"gpuwire", "guest_agent", "host_proxy", "aggregator"}


def run(room: str, extra: str) -> int:
    """Runs the program of `room`. Where a library that it imports is not installed, says so and returns the exit status."""
    try:
        program = import_module(f"{room}.__main__")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        # No extra brings those.
        if library in OURS or library in sys.stdlib_module_names:
            raise
        problem = f"{library} is not installed; run: pip install 'cvm-gpu-telemetry[{extra}]'"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    program.main()
    return 0


guest_agent = partial(run, "guest_agent", "agent")
host_proxy = partial(run, "host_proxy", "proxy")
aggregator = partial(run, "aggregator", "aggregator")
