from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, inspect, text

from aggregator.catalogue import differences
from aggregator.check import problems
from aggregator.database import parse_database_url
from aggregator.store import MIGRATIONS, Store
from aggregator.tables import UTILIZATION_BINS, metadata, sqlite_metadata
from aggregator.views import view_queries
from gpuwire.device import GAUGES
from gpuwire.errors import StartError
from tests.aggregator.test_store import DEVICE, T0, TRAINER, S, ask, poll, sample

SAMPLE = (
    "vmm vm_id vm_name app_id instance_id uuid gpu_index pci_bus_id bdf host_bdf host_bdf_source sampled_at sampled_at_ms "
    "polled_at_ms utilization_gpu utilization_memory memory_total_bytes memory_used_bytes memory_free_bytes temperature_c "
    "power_usage_mw query_errors"
)
HEAD = "0003"
NUMBERS = [gauge.name for gauge in GAUGES]
BUCKET = " ".join(
    (
        "vmm vm_id vm_name app_id instance_id uuid bdf host_bdf host_bdf_source bucket bucket_ms samples",
        *(f"{name}_avg {name}_min {name}_max" for name in NUMBERS),
        *(f"{name}_last" for name in NUMBERS),
        "query_errors covered_ms energy_uj",
        *UTILIZATION_BINS,
    )
)
# The contract's "SQL names", word for word.
CONTRACT = {
    "v_gpu_samples": SAMPLE,
    "v_gpu_latest": f"{SAMPLE} model cc_enabled cc_ready state",
    "v_gpu_tenancy": ("uuid vmm vm_id vm_name app_id instance_id bdf host_bdf host_bdf_source first_seen last_seen"),
    "v_cvm_state": "vmm vm_id vm_name outcome detail schema_status cc_enabled cc_ready since until",
    "v_gpu_5m": BUCKET,
    "v_gpu_1h": BUCKET,
}


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(parse_database_url(database_url))
    yield engine
    engine.dispose()


def catalogue(connection: Connection) -> dict[str, object]:
    """All that the database knows of its own shape, by name. The order of columns is not part of it: one that a migration
    adds comes last."""
    if connection.dialect.name == "sqlite":
        rows = connection.execute(text("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        return {name: sqlite_definition(sql) for name, sql in rows if "alembic" not in name}
    rows = connection.execute(
        text("""
        SELECT 'column ' || table_name || '.' || column_name,
               concat_ws(' ', data_type, is_nullable, column_default)
        FROM information_schema.columns WHERE table_schema = 'public'
        UNION ALL
        SELECT 'constraint ' || conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace
        UNION ALL
        SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
        UNION ALL
        SELECT 'view ' || viewname, definition FROM pg_views WHERE schemaname = 'public'
        """)
    )
    return {name: definition for name, definition in rows if "alembic" not in name}


def sqlite_definition(sql: str) -> object:
    """A CREATE statement; a table's columns and constraints in no order."""
    sql = " ".join(sql.split())
    if not sql.startswith("CREATE TABLE"):
        return sql
    body = sql[sql.index("(") + 1 : sql.rindex(")")]
    parts, depth = [""], 0
    for character in body:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return sql.replace(body, ""), sorted(part.strip() for part in parts)


def upgrade_to(engine: Engine, revision: str) -> None:
    """As an earlier version of the program would have left the database."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def rebuild(connection: Connection) -> None:
    """The database made anew from tables.py and views.py, without any migration."""
    names = inspect(connection)
    for view in names.get_view_names():
        connection.execute(text(f"DROP VIEW {view}"))
    metadata.drop_all(connection)
    metadata.create_all(connection)
    if connection.dialect.name == "sqlite":
        sqlite_metadata.drop_all(connection)
        sqlite_metadata.create_all(connection)
        connection.execute(text("INSERT INTO hot_move VALUES (0, 0)"))
    else:
        for table in ("gpu_sample", "gpu_5m", "gpu_1h"):
            connection.execute(text(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT"))
    connection.execute(text("INSERT INTO progress (resolution) VALUES ('raw'), ('5m'), ('1h')"))
    for view, query in view_queries(connection.dialect.name).items():
        connection.execute(text(f"CREATE VIEW {view} AS {query}"))


@pytest.mark.usefixtures("store")
def test_migrated_database_is_what_tables_and_views_say(engine: Engine) -> None:
    assert_no_drift(engine)


def assert_no_drift(engine: Engine) -> None:
    with engine.begin() as connection:
        assert differences(connection) == []
        migrated = catalogue(connection)
        rebuild(connection)
        assert differences(connection) == []
        described = catalogue(connection)
    assert len(migrated) > 10
    assert not described.keys() - migrated.keys(), "the migrations lag behind aggregator/tables.py and views.py"
    assert not migrated.keys() - described.keys(), "aggregator/tables.py and views.py lag behind the migrations"
    assert migrated == described


@pytest.mark.usefixtures("store")
def test_view_columns_are_those_of_the_contract_in_its_order(engine: Engine) -> None:
    with engine.connect() as connection:
        found = {view: list(connection.execute(text(f"SELECT * FROM {view}")).keys()) for view in CONTRACT}
    assert found == {view: columns.split() for view, columns in CONTRACT.items()}


@pytest.mark.usefixtures("store")
def test_every_gauge_is_a_column_of_samples(engine: Engine) -> None:
    with engine.connect() as connection:
        columns = {column["name"] for column in inspect(connection).get_columns("gpu_sample")}
    assert {gauge.name for gauge in GAUGES} <= columns


def test_empty_database_is_upgraded_once_and_then_left_alone(database_url: str) -> None:
    with closing(Store(database_url)) as store:
        assert store.revision() is None
        store.require_current()
        first = store.revision()
        store.require_current()
        store.upgrade()
        assert first == store.revision() == HEAD


def test_empty_database_is_refused_where_it_may_not_be_upgraded(database_url: str) -> None:
    with closing(Store(database_url)) as store:
        with pytest.raises(StartError, match="is empty; run: gpu-aggregator db upgrade --db "):
            store.require_current(upgrade_empty=False)
        assert store.revision() is None


@pytest.mark.usefixtures("store")
def test_older_schema_is_refused_with_the_command_to_run(database_url: str, tmp_path: Path) -> None:
    migrations = tmp_path / "100% migrations"
    shutil.copytree(MIGRATIONS, migrations)
    migration = f'revision = "9999"\ndown_revision = "{HEAD}"\ndef upgrade() -> None: pass\n'
    (migrations / "versions" / "9999_later.py").write_text(migration)
    with closing(Store(database_url, migrations)) as later:
        with pytest.raises(StartError) as refusal:
            later.require_current()
        what_to_do = f"has schema {HEAD}, this program needs 9999; run: gpu-aggregator db upgrade --db {later.name}"
        assert str(refusal.value) == f"database {later.name} {what_to_do}"
        assert later.revision() == HEAD
        later.require_current(upgrade=True)
        assert later.revision() == "9999"


def test_newer_schema_is_refused(store: Store, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '7777'"))
    for start in (store.require_current, store.upgrade):
        with pytest.raises(StartError, match="has schema 7777, which this program is too old for"):
            start()


# What a database of each version before this one holds, as its program wrote it: rows in every table, NULL wherever it may be.
SAMPLE_1 = """
    INSERT INTO gpu_{table} (gpu_id, sampled_at_ms, tenancy_id, polled_at_ms, gpu_index, utilization_gpu, utilization_memory,
        memory_total_bytes, memory_used_bytes, memory_free_bytes, temperature_c, power_usage_mw, query_errors) VALUES
        {rows}
"""
SAMPLES = (
    f"(1, {T0 - 15 * S}, 1, {T0 - 14 * S}, 0, 97, 0, 150754820096, 81604378624, 69150441472, 61, 700000, 0)",
    f"(1, {T0}, 1, {T0 + 1}, 0, 0, 0, 150754820096, 0, 150754820096, 30, 0, 0)",
    f"(2, {T0 - 60 * S}, 2, {T0 - 60 * S}, 4294967295, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 7)",
    f"(3, {T0}, 3, {T0}, 0, 5, NULL, NULL, NULL, NULL, 41, NULL, 2)",
)
FIRST_TABLES = (
    "INSERT INTO setting (name, value) VALUES ('stale_after_s', '120.0')",
    """
    INSERT INTO cvm (cvm_id, vmm, vm_id, vm_name, app_id, instance_id, state_id) VALUES
        (1, 'rack1', 'vm-a', 'trainer', 'app-1', 'instance-1', 2),
        (2, 'rack1', 'vm-b', NULL, NULL, NULL, 3),
        (3, 'rack2', 'vm-a', NULL, NULL, NULL, NULL)
    """,
    # A card, the place at which it sat before its uuid was known, and a place whose card nobody knows.
    """
    INSERT INTO gpu (gpu_id, card_id, uuid, cvm_id, bdf, model) VALUES
        (1, 1, 'GPU-11111111-aaaa', NULL, NULL, 'H200'), (2, 1, NULL, 1, '0000:01:00.0', NULL), (3, 3, NULL, 2, '', NULL)
    """,
    f"""
    INSERT INTO tenancy (tenancy_id, gpu_id, cvm_id, pci_bus_id, bdf, host_bdf, host_bdf_source, first_seen_ms, last_seen_ms)
    VALUES
        (1, 1, 1, '00000000:01:00.0', '0000:01:00.0', '0000:19:00.0', 'order', {T0 - 60 * S}, {T0}),
        (2, 2, 1, '00000000:01:00.0', '0000:01:00.0', NULL, NULL, {T0 - 60 * S}, {T0 - 60 * S}),
        (3, 3, 2, NULL, NULL, NULL, NULL, {T0}, {T0})
    """,
    SAMPLE_1.format(table="sample", rows=", ".join(SAMPLES)),
    SAMPLE_1.format(table="latest", rows=", ".join(SAMPLES[1:])),
    f"""
    INSERT INTO cvm_state (state_id, cvm_id, since_ms, until_ms, outcome, detail, schema_status, cc_enabled, cc_ready) VALUES
        (1, 1, {T0 - 90 * S}, {T0 - 75 * S}, 'timeout', 'no answer in 10 s', NULL, NULL, NULL),
        (2, 1, {T0 - 60 * S}, {T0}, 'ok', NULL, 'match', true, false),
        (3, 2, {T0}, {T0}, 'ok', NULL, NULL, NULL, NULL)
    """,
)
STATES = {"0001": FIRST_TABLES, "0002": FIRST_TABLES}
# The next ids that PostgreSQL gives come after those.
COUNTED_UP = (("cvm", "cvm_id"), ("gpu", "gpu_id"), ("tenancy", "tenancy_id"), ("cvm_state", "state_id"))


def test_there_is_a_database_of_each_version_before_this_one() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    revisions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    assert STATES.keys() == revisions - {HEAD}, "give the version before yours a database in STATES"


@pytest.mark.parametrize("revision", STATES)
def test_database_of_an_earlier_version_answers_as_before_and_goes_on(database_url: str, engine: Engine, revision: str) -> None:
    upgrade_to(engine, revision)
    with engine.begin() as connection:
        for statement in STATES[revision]:
            connection.execute(text(statement))
        if engine.dialect.name == "postgresql":
            for table, key in COUNTED_UP:
                connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', '{key}'), 3)"))
    views = sorted(inspect(engine).get_view_names())
    before = {view: ask(engine, f"SELECT * FROM {view}") for view in views}
    assert {view: len(rows) for view, rows in before.items()} == {
        "v_cvm_state": 3,
        "v_gpu_latest": 3,
        "v_gpu_samples": 4,
        "v_gpu_tenancy": 2,
    }
    with closing(Store(database_url)) as store:
        refused = f"has schema {revision}, this program needs {HEAD}; run: gpu-aggregator db upgrade --db "
        with pytest.raises(StartError, match=refused):
            store.require_current()
        store.upgrade()
        for view, rows in before.items():
            columns = ", ".join(rows[0])
            assert by_text(ask(engine, f"SELECT {columns} FROM {view}")) == by_text(rows), view
        assert store.write([poll(T0 + 15 * S, sample(T0 + 15 * S, DEVICE), cvm=TRAINER)]) == 1
        assert len(ask(engine, "SELECT * FROM v_gpu_tenancy")) == 2
        assert not [line for line in problems(store.condition()) if "serve running" not in line]
    with engine.begin() as connection:
        assert differences(connection) == []
    assert_no_drift(engine)


def by_text(rows: list[dict[str, object]]) -> list[str]:
    return sorted(str(list(row.items())) for row in rows)


def test_tables_of_another_program_are_left_alone(database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE gpu (name text)"))
    with closing(Store(database_url)) as store:
        with pytest.raises(StartError, match=r"tables of another program \(gpu\)"):
            store.require_current()
        assert store.revision() is None


def test_two_programs_that_upgrade_at_once_both_succeed(database_url: str) -> None:
    failures: list[Exception] = []

    def start() -> None:
        try:
            with closing(Store(database_url)) as store:
                store.require_current()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
