"""The connection: SQLite by default (WAL, durable commits), PostgreSQL when outgrown. One writer at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, event, select, text
from sqlalchemy.engine import Engine

from . import tables

_WRITE_LOCK = 0x6661_7266  # any number that nothing else on the server locks


class Ledger:
    """An open ledger. `write()` and `read()` give transactions for the functions of this package."""

    def __init__(self, url: str):
        self.url = url
        sqlite = url.startswith("sqlite")
        options: dict[str, Any] = {"connect_args": {"check_same_thread": False, "timeout": 20}} if sqlite else {}
        self.engine: Engine = create_engine(url, pool_size=10, max_overflow=20, **options)
        self._writer = threading.Lock()
        self.sqlite = sqlite
        self._watcher: Any = None
        if sqlite:
            event.listen(self.engine, "connect", _sqlite_connect)
            event.listen(self.engine, "begin", _sqlite_begin)

    def create(self) -> None:
        """Create the tables that are missing. Several processes may do so at once."""
        with self.write() as connection:
            tables.metadata.create_all(connection)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction: committed at the end of the block, rolled back by an exception."""
        with self._writer, self.engine.connect().execution_options(farflung_write=True) as connection:
            with connection.begin():
                if not self.sqlite:  # one writer at a time among processes too; SQLite begins with its own lock
                    connection.execute(text(f"select pg_advisory_xact_lock({_WRITE_LOCK})"))
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one consistent view, never waits for writers on SQLite in WAL mode."""
        level = {} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        with self.engine.connect().execution_options(**level) as connection, connection.begin():
            yield connection

    def change_marker(self) -> int:
        """A number that differs whenever somebody else has committed; cheap enough to ask many times a second."""
        if not self.sqlite:
            with self.engine.connect() as connection:
                return int(connection.execute(text("select coalesce(max(id), 0) from events")).scalar_one())
        if self._watcher is None:  # data_version is relative to a connection that nobody else uses
            self._watcher = self.engine.raw_connection()
            self._watcher.detach()
        return int(self._watcher.cursor().execute("pragma data_version").fetchone()[0])

    def close(self) -> None:
        """Close all connections."""
        if self._watcher is not None:
            self._watcher.close()
        self.engine.dispose()


def _sqlite_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _sqlite_begin
    cursor = connection.cursor()
    cursor.execute("pragma journal_mode = wal")
    cursor.execute("pragma synchronous = full")
    cursor.execute("pragma busy_timeout = 20000")
    cursor.execute("pragma foreign_keys = on")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("farflung_write")
    connection.exec_driver_sql("begin immediate" if write else "begin")


def get_meta(tx: Connection, key: str) -> Any:
    """A value of the `meta` table, or None."""
    row = tx.execute(select(tables.meta.c.value).where(tables.meta.c.key == key)).scalar_one_or_none()
    return None if row is None else json.loads(row)


def set_meta(tx: Connection, key: str, value: Any) -> None:
    """Insert or replace a value of the `meta` table."""
    changed = tx.execute(
        tables.meta.update().where(tables.meta.c.key == key).values(value=json.dumps(value))
    )
    if changed.rowcount == 0:
        tx.execute(tables.meta.insert().values(key=key, value=json.dumps(value)))
