from __future__ import annotations

import csv
import io

import pytest

from aggregator.csv_text import csv_lines


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_text_that_a_spreadsheet_would_run_is_made_a_text(text: str) -> None:
    assert list(csv.reader(io.StringIO(csv_lines([[text, "a=b"]]), newline=""))) == [[f"'{text}", "a=b"]]


def test_numbers_stay_numbers_and_absent_is_empty() -> None:
    assert csv_lines([[-1, 0.5, None, "GPU-1", ""]]) == "-1,0.5,,GPU-1,\r\n"


def test_commas_quotes_and_lines_within_are_kept() -> None:
    row = ["a,b", 'c"d', "e\nf", "g\r\nh"]
    assert list(csv.reader(io.StringIO(csv_lines([row]), newline=""))) == [row]
