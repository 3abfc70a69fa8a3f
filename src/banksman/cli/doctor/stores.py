"""The store: whether it is whole, who has it open, how large it is, and whether there is room for more.

One on NATS is looked at by `cluster.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from banksman.cli.doctor import Check, Finding, Which, cluster, note, ok, wrong
from banksman.cli.doctor.machine import room
from banksman.cli.doctor.places import private, stores
from banksman.cluster import store_address as addresses
from banksman.store.sqlite import store_health
from banksman.store.sqlite.store_health import StoreHealth

# Beyond it a look takes long, and so does a backup.
LARGE_BYTES = 8 << 30
_KNOWN = ("sqlite:", "memory:", *addresses.SCHEMES)


def checks(which: Which) -> list[Check]:
    def store() -> Iterator[Finding]:
        for path in stores(which.store):
            yield from _of(path)
        if which.store is not None and not which.store.startswith(_KNOWN):
            yield wrong("store", f"there is no store {which.store!r:.100}", "sqlite:PATH, or nats://HOST:4222")

    return [store, *cluster.checks(which)]


def _of(path: Path) -> Iterator[Finding]:
    found = store_health.look(path)
    if found is None:
        yield ok("store", f"{path} (there is none yet)")
        folder = next(folder for folder in path.parents if folder.is_dir())
        yield room("disk", str(folder))
        return
    yield from _health(found)
    for name in ("", "-wal", "-shm"):
        file = Path(f"{path}{name}")
        if file.exists():
            verdict = private("store", file, os.stat(file), may_be_read=False)
            if verdict.fix:
                yield verdict
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        yield wrong("store", f"{path} cannot be written", f"let this user write it, and its folder {path.parent}")
    yield room("disk", str(path.parent))


def _health(found: StoreHealth) -> Iterator[Finding]:
    size = found.store_bytes + found.log_bytes
    who = f", in use by process {', '.join(map(str, found.hosts))}" if found.hosts else ""
    seen = f"{found.path}, schema {found.schema}, {found.sessions} sessions, {size / (1 << 20):.1f} MiB{who}"
    if found.faults:
        fix = "with no program using it, copy it and those beside it (-wal, -shm) to a safe place; restore a backup"
        yield wrong("store", f"{found.path} is damaged: {'; '.join(found.faults)}", fix)
    for damaged in found.damaged:
        fix = "restore a backup of the store; or delete the session (banksman close --forget): the others are whole"
        yield wrong("session", f"{found.path}: {damaged}", fix)
    if found.faults:
        return
    if not found.is_checked:
        seen += f"; not looked at to the end, since that takes longer than {store_health.CHECK_SECONDS_MAX:.0f} s"
        yield note("store", seen, "sqlite3 FILE 'PRAGMA integrity_check' does, if you have the time")
    elif size > LARGE_BYTES:
        yield note("store", seen, "keep less: keep_bytes and keep_seconds in [serve]")
    else:
        yield ok("store", f"{seen}, whole")
