"""A schema in one form, as it is in a database and as tables.py and views.py describe it, and how the two differ.

The form is what a thing is by its name, such as `column gpu.model`: `TEXT`. Partitions are no part of it, but for those that
take what has no other. Reads only; `put_back` excepted, which makes again what holds no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    DefaultClause,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    create_engine,
    text,
)
from sqlalchemy.exc import DBAPIError

from aggregator.tables import metadata, sqlite_metadata
from aggregator.views import view_queries

Catalogue = dict[str, str]

# A plan may change between two looks, when statistics do.
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing, such as `index ix_gpu_card_id`, that is not defined as it should be. None: it is, or should be, absent."""

    name: str
    found: str | None
    expected: str | None

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name} is missing"
        if self.expected is None:
            return f"{self.name} is not ours"
        if self.name.startswith("view "):
            return f"{self.name} is another one"
        return f"{self.name} is {self.found or 'plain'}, should be {self.expected or 'plain'}"

    @property
    def harmless(self) -> bool:
        """An addition that refuses no row of ours."""
        if self.expected is not None or self.found is None:
            return False
        match self.name.split()[0]:
            case "table" | "view":
                return True
            case "index":
                return not self.found.upper().startswith(("UNIQUE", "CREATE UNIQUE"))
            case "column":
                return "NOT NULL" not in self.found or "DEFAULT" in self.found
        return False

    @property
    def fatal(self) -> bool:
        """Without it rows can be neither written nor read."""
        return self.found is None and self.name.startswith(("table ", "column ", "row "))

    @property
    def can_be_put_back(self) -> bool:
        return self.found is None and self.name.startswith(("index ", "view "))


def differences(connection: Connection) -> list[Difference]:
    """Between the database, whose schema has our version, and ours; by name. A view whose tables are not all there is not
    compared."""
    look = _sqlite if connection.dialect.name == "sqlite" else _postgres
    for _ in range(_LOOKS):
        found, expected = look(connection)
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if not any(name.startswith("view ") and name in found and name in expected for name in names):
            break
    every = [Difference(name, found.get(name), expected.get(name)) for name in names]
    # Of a table that is missing, or not ours, its columns go without saying.
    whole = {difference.name.split()[1] for difference in every if difference.name.startswith("table ")}
    every = [d for d in every if d.name.split()[0] not in ("column", "constraint") or _owner(d.name) not in whole]
    return every + list(_lost_rows(connection, found))


def _lost_rows(connection: Connection, found: Catalogue) -> Iterator[Difference]:
    """Rows that came with the schema, which all that is kept hangs on."""
    if "column progress.resolution" in found:
        there = set(connection.execute(text("SELECT resolution FROM progress")).scalars())
        yield from (Difference(f"row progress.{name}", None, "") for name in ("raw", "5m", "1h") if name not in there)
    if "table hot_move" in found and not connection.execute(text("SELECT count(*) FROM hot_move")).scalar():
        yield Difference("row hot_move", None, "")


def put_back(connection: Connection, missing: list[Difference]) -> None:
    """Makes indexes and views again, of those `missing` that can be put back."""
    views = view_queries(connection.dialect.name)
    indexes = {str(index.name): index for table in _tables(connection) for index in table.indexes}
    for difference in missing:
        kind, name = difference.name.split()
        if kind == "view":
            connection.execute(text(f"CREATE VIEW {name} AS {views[name]}"))
        else:
            indexes[name].create(connection)


def _owner(name: str) -> str:
    return name.split()[1].partition(".")[0]


def _tables(connection: Connection) -> list[Table]:
    ours = list(metadata.tables.values())
    return ours + (list(sqlite_metadata.tables.values()) if connection.dialect.name == "sqlite" else [])


# SQLite keeps the text of each statement that made something: ours is made once more, in memory, and its text compared.


def _sqlite(connection: Connection) -> tuple[Catalogue, Catalogue]:
    engine = create_engine("sqlite://")
    with engine.begin() as ours:
        metadata.create_all(ours)
        sqlite_metadata.create_all(ours)
        for view, query in view_queries("sqlite").items():
            ours.execute(text(f"CREATE VIEW {view} AS {query}"))
        expected = _sqlite_catalogue(ours)
    engine.dispose()
    return _sqlite_catalogue(connection), expected


def _sqlite_catalogue(connection: Connection) -> Catalogue:
    rows = connection.execute(
        text(
            "SELECT type, name, sql FROM sqlite_master"
            " WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name <> 'alembic_version'"
        )
    )
    return {name: definition for kind, thing, sql in rows for name, definition in _sqlite_things(kind, thing, sql)}


def _sqlite_things(kind: str, name: str, sql: str) -> Iterator[tuple[str, str]]:
    # ALTER TABLE writes names in quotes.
    sql = " ".join(sql.replace('"', "").split())
    if kind != "table":
        yield f"{kind} {name}", sql
        return
    body, rest = _split_body(sql)
    yield f"table {name}", rest
    for part in body:
        first, _, definition = part.partition(" ")
        if first == "CONSTRAINT":
            inner, _, definition = definition.partition(" ")
            yield f"constraint {name}.{inner}", definition
        else:
            yield f"column {name}.{first}", definition


def _split_body(create_table: str) -> tuple[list[str], str]:
    """The columns and constraints of a CREATE TABLE, and what stands behind them."""
    start, end = create_table.find("(") + 1, create_table.rfind(")")
    parts, depth = [""], 0
    for character in create_table[start:end]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts], create_table[end + 1 :].strip()


# PostgreSQL keeps what it understood: ours is written as it would put it. Of a view it keeps a text of its own making: a view
# is ours if it has our columns and is read by the same plan as our query.

_POSTGRES = text("""
    WITH ours AS (
        SELECT oid, relname, relkind, relispartition, pg_get_expr(relpartbound, oid) AS bound
        FROM pg_class
        WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND relname <> 'alembic_version'
    ),
    tables AS (SELECT oid, relname, relkind FROM ours WHERE relkind IN ('r', 'p') AND NOT relispartition)
    SELECT 'table ' || relname, CASE relkind WHEN 'p' THEN 'partitioned by ' || pg_get_partkeydef(oid) ELSE '' END FROM tables
    UNION ALL
    SELECT 'partition ' || relname, bound FROM ours WHERE relispartition AND bound = 'DEFAULT'
    UNION ALL
    SELECT 'column ' || relname || '.' || attname,
           concat_ws(' ', format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'NOT NULL' END,
                     'DEFAULT ' || pg_get_expr(adbin, adrelid))
    FROM tables JOIN pg_attribute ON attrelid = tables.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    UNION ALL
    SELECT 'constraint ' || relname || '.' || conname, pg_get_constraintdef(pg_constraint.oid)
    FROM tables JOIN pg_constraint ON conrelid = tables.oid AND contype IN ('p', 'u', 'f', 'c', 'x')
    UNION ALL
    SELECT 'index ' || indexes.relname,
           concat_ws(' ', CASE WHEN indisunique THEN 'UNIQUE' END,
                     substring(pg_get_indexdef(indexrelid) FROM 'USING (.*)'), CASE WHEN NOT indisvalid THEN 'INVALID' END)
    FROM tables JOIN pg_index ON indrelid = tables.oid JOIN pg_class AS indexes ON indexes.oid = indexrelid
    WHERE NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u', 'x'))
    UNION ALL
    SELECT 'trigger ' || tgname, pg_get_triggerdef(pg_trigger.oid)
    FROM tables JOIN pg_trigger ON tgrelid = tables.oid AND NOT tgisinternal
    UNION ALL
    SELECT 'view ' || relname, '' FROM ours WHERE relkind IN ('v', 'm')
""")


def _postgres(connection: Connection) -> tuple[Catalogue, Catalogue]:
    found: Catalogue = {name: _bare_check(definition) for name, definition in connection.execute(_POSTGRES)}
    expected = dict(_described(connection))
    for view, query in view_queries("postgresql").items():
        name = f"view {view}"
        expected[name] = ""
        if name in found and (ours := _view(connection, query)) is not None:
            expected[name] = ours
            found[name] = _view(connection, f"SELECT * FROM {view}") or "cannot be read"
    return found, expected


def _described(connection: Connection) -> Iterator[tuple[str, str]]:
    for table in metadata.tables.values():
        partitioned = table.dialect_options["postgresql"]["partition_by"]
        yield f"table {table.name}", f"partitioned by {partitioned}" if partitioned else ""
        if partitioned:
            yield f"partition {table.name}_default", "DEFAULT"
        for column in table.columns:
            yield f"column {table.name}.{column.name}", _column(connection, table, column)
        for constraint in table.constraints:
            yield f"constraint {table.name}.{constraint.name}", _CONSTRAINTS[type(constraint)](constraint)
        for index in table.indexes:
            method = index.dialect_options["postgresql"]["using"] or "btree"
            yield f"index {index.name}", f"{method} ({', '.join(index.columns.keys())})"


def _column(connection: Connection, table: Table, column: Column[Any]) -> str:
    parts = [column.type.compile(dialect=connection.dialect).lower(), *([] if column.nullable else ["NOT NULL"])]
    if column is table.autoincrement_column:
        parts.append(f"DEFAULT nextval('{table.name}_{column.name}_seq'::regclass)")
    elif isinstance(column.server_default, DefaultClause):
        parts.append(f"DEFAULT {column.server_default.arg}")
    return " ".join(parts)


def _keys(constraint: Any) -> str:
    return ", ".join(constraint.columns.keys())


def _foreign_key(constraint: ForeignKeyConstraint) -> str:
    there = ", ".join(element.column.name for element in constraint.elements)
    return f"FOREIGN KEY ({_keys(constraint)}) REFERENCES {constraint.referred_table.name}({there})"


_CONSTRAINTS: Mapping[type, Callable[[Any], str]] = {
    PrimaryKeyConstraint: lambda constraint: f"PRIMARY KEY ({_keys(constraint)})",
    UniqueConstraint: lambda constraint: f"UNIQUE ({_keys(constraint)})",
    ForeignKeyConstraint: _foreign_key,
    CheckConstraint: lambda constraint: _bare_check(f"CHECK {constraint.sqltext}"),
}


def _bare_check(definition: str) -> str:
    """Without the brackets that PostgreSQL puts around everything."""
    return definition.replace("(", "").replace(")", "") if definition.startswith("CHECK") else definition


def _view(connection: Connection, query: str) -> str | None:
    """What a query gives and how it is read; None where it cannot be."""
    try:
        with connection.begin_nested():
            empty = connection.execute(text(f"SELECT * FROM ({query}) AS v LIMIT 0"))
            columns = [f"{column[0]} {column[1]}" for column in empty.cursor.description]
            plan = connection.execute(text(f"EXPLAIN (VERBOSE, COSTS OFF) {query}")).scalars()
            return "\n".join([*columns, *plan])
    except DBAPIError as error:
        # A table or column that is missing is named by itself.
        if getattr(error.orig, "sqlstate", "") in ("42P01", "42703"):
            return None
        raise
