"""CSV for programs that does no harm in a spreadsheet. RFC 4180; absent is empty."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

# A spreadsheet takes a cell for a formula that begins so, and runs it. Names are the tenants'.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_lines(rows: Iterable[Sequence[Any]], *, line_end: str = "\r\n") -> str:
    """A text that a spreadsheet would run has an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=line_end)
    writer.writerows(
        [f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value for value in row] for row in rows
    )
    return out.getvalue()
