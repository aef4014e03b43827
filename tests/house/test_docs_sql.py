"""SQL of the docs is run: each block, and each SELECT in inline code, on the databases that it is for, with a fleet in them. Of
those that other tests run it is said here which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from tests.aggregator.conftest import database_url
from tests.aggregator.test_cookbook import engine
from tests.house.doc_checks import ROOT, Document
from tests.house.test_docs import DOCS
from tests.postgres import postgres_url

__all__ = ["database_url", "engine", "postgres_url"]

# tests/aggregator/test_cookbook.py runs all of the one, and looks at the answers.
RUN_ELSEWHERE = {ROOT / "docs/sql-cookbook.md"}
# tests/aggregator/test_backup.py runs these, of docs/operations.md, as the superuser that they need.
NEEDS_A_SUPERUSER = re.compile(r"\s*(?:CREATE ROLE|GRANT)\b")


@dataclass(frozen=True)
class Sql:
    """`dialect` is empty where it is for both."""

    dialect: str
    text: str


def statements(doc: Document) -> Iterator[Sql]:
    blocks = re.findall(r"(?:^(SQLite|PostgreSQL)\b[^\n]*:\n\n)?^```sql\n(.*?)^```$", doc.text, re.MULTILINE | re.DOTALL)
    for dialect, block in blocks:
        if not NEEDS_A_SUPERUSER.match(block):
            yield Sql(dialect.lower(), block)
    for span in doc.spans:
        if re.match(r"SELECT\b.*\bFROM\b", span):
            yield Sql("postgresql" if re.search(r"\bpg_", span) else "", span)
    for words in doc.calls:
        if words[:1] == ["psql"] and "-c" in words:
            yield Sql("postgresql", words[words.index("-c") + 1])
        if words[:1] == ["sqlite3"] and words[-1].upper().startswith("SELECT"):
            yield Sql("sqlite", words[-1])


def refused(engine: Engine, sql: Sql) -> str:
    """Why the database does not take it; empty where it does, or where it is for the other."""
    if sql.dialect not in ("", engine.dialect.name):
        return ""
    try:
        with engine.connect() as connection:
            for statement in filter(str.strip, sql.text.split(";")):
                connection.exec_driver_sql(statement.replace("%", "%%") if engine.dialect.name == "postgresql" else statement)
    except DBAPIError as error:
        return f"{sql.text}: {error.orig}"
    return ""


def test_sql_of_the_docs_is_taken_by_the_database(engine: Engine) -> None:
    found = [sql for path in DOCS if path not in RUN_ELSEWHERE for sql in statements(Document(path, path.read_text()))]
    assert found
    assert [problem for sql in found if (problem := refused(engine, sql))] == []


WRONG = """\
In SQL: `SELECT none FROM v_gpu_samples`.

```sql
SELECT uuid FROM v_none;
```

PostgreSQL:

```sql
SELECT now()
```

```sh
psql gpu_history -c 'SELECT none FROM v_cvm_state'
```
"""


def test_sql_that_is_wrong_is_found(engine: Engine) -> None:
    found = [refused(engine, sql) != "" for sql in statements(Document(Path("wrong.md"), WRONG))]
    assert found == [True, False, True, engine.dialect.name == "postgresql"]
