"""docs/sql-cookbook.md: each block runs, on each database that it is for, and answers what stands below it, of a fleet whose
figures are known (story.py). The views say of each column what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, inspect, text

from aggregator.comments import VIEWS, column_comment
from aggregator.database import parse_database_url
from aggregator.store import Store
from tests.aggregator.story import tell

DOC = Path(__file__).parents[2] / "docs/sql-cookbook.md"


@dataclass(frozen=True)
class Question:
    """`blocks` are SQL by the database that they are for, None for both; `answer` are the cells of the table below."""

    title: str
    blocks: list[tuple[str | None, str]]
    answer: list[list[str]]


def questions() -> Iterator[Question]:
    for section in DOC.read_text().split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        blocks = re.findall(r"(?:^(SQLite|PostgreSQL):\n\n)?^```sql\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines() if line.startswith("|")]
        yield Question(title, [(name.lower() or None, sql) for name, sql in blocks], [rows[0], *rows[2:]])


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return (
        f"{value:g}" if isinstance(value, float) else str(value.normalize() + 0) if isinstance(value, Decimal) else str(value)
    )


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with closing(Store(database_url, max_lag_s=0)) as store:
        store.require_current()
        tell(store)
    engine = create_engine(parse_database_url(database_url))
    yield engine
    engine.dispose()


def test_every_question_is_answered_as_it_says(engine: Engine) -> None:
    asked = 0
    for question in questions():
        sqls = [sql for name, sql in question.blocks if name in (None, engine.dialect.name)]
        assert sqls, question.title
        for sql in sqls[:-1]:
            with engine.begin() as connection:
                connection.exec_driver_sql(sql)
        with engine.connect() as connection:
            found = connection.execute(text(sqls[-1].replace(":", "\\:")))
            heads, rows = list(found.keys()), [list(row) for row in found]
        booleans = [number for number, head in enumerate(heads) if head.startswith("cc_")]
        answer = [
            [
                str(bool(value)).lower() if number in booleans and value is not None else shown(value)
                for number, value in enumerate(row)
            ]
            for row in rows
        ]
        assert [heads, *answer] == question.answer, question.title
        asked += 1
    assert asked >= 15


def test_every_column_of_every_view_says_what_it_is(engine: Engine) -> None:
    looked = inspect(engine)
    for view in VIEWS:
        for column in looked.get_columns(view):
            words = column_comment(view, column["name"])
            assert words, f"aggregator/comments.py says nothing of {view}.{column['name']}"
            if engine.dialect.name == "postgresql":
                assert column["comment"] == words
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            said = connection.execute(text("SELECT obj_description(CAST(:view AS regclass))"), {"view": "v_gpu_5m"}).scalar()
            assert said == VIEWS["v_gpu_5m"]
