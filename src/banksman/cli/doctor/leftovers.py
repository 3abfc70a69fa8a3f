"""Find processes and files that dead hosts left behind, and remove on request what is safe.

Nothing is touched that may still be in use:

- A process is identified by pid, start time and boot id. A host that has claimed its session ends
  it, as any host does at its start.
- A socket is dead if the kernel says that no process listens.
- A server's announcement is stale if it is from this boot and its process is gone.
- Output files of commands have an owner file. Its lock is free when the owner process is dead.
  Older versions wrote no owner file, and a caller may have kept the output file. These files are
  left alone for a day, and as long as a host lives that could have made them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from banksman import sockets
from banksman.cli.doctor import Check, DoctorOptions, Finding, note, ok, wrong
from banksman.cli.doctor.places import stores
from banksman.commands import output
from banksman.errors import BanksmanError
from banksman.folders import sockets_folder, state_folder
from banksman.process import orphans
from banksman.process.keeper.proc_tree import name_of, read_stat
from banksman.store.sqlite import store_health
from banksman.store.sqlite.store_health import UnsettledSession

SPILL_SECONDS_MIN = 24 * 3600.0
SPILLS_MAX = 10_000
_FILE_BYTES_MAX = 64 << 10
# The names that older versions created with `tempfile`. A person would not choose these names.
_SPILL = re.compile(r"banksman-[a-z0-9_]{8}\.out")
_KEEPER = "/banksman/process/keeper/__main__.py"
_SWEEP = "banksman doctor --sweep"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A finding and how to remove it.

    `remove`: does it, and returns a description of each action, or raises. None if it must not be
    removed here, or disappears without help.
    """

    finding: Finding
    remove: Callable[[], Iterable[str]] | None = None


def checks(which: DoctorOptions) -> list[Check]:
    def leftovers() -> Iterator[Finding]:
        found = list(find(which.store))
        yield from (each.finding for each in found)
        if not found:
            yield ok("leftovers", "none")

    return [leftovers]


def find(store: str | None = None) -> Iterator[Leftover]:
    """Yield all leftovers. A search that fails becomes a finding and does not stop the others."""
    for finder in (lambda: _sessions(store), _keepers, _sockets, _announcement, _spills):
        try:
            yield from finder()
        except BanksmanError as exc:
            yield Leftover(
                wrong("leftovers", exc.args[0], exc.hint or "fix the cause that the error names")
            )
        except (OSError, ValueError) as exc:
            yield Leftover(
                wrong("leftovers", f"cannot check them: {exc}", "give this user access to them")
            )


def sweep(store: str | None = None) -> Iterator[tuple[bool, str]]:
    """Remove all leftovers. Yield whether each action succeeded, and its description."""
    for each in list(find(store)):
        if each.remove is None:
            continue
        try:
            for words in each.remove():
                yield True, words
        except (BanksmanError, OSError, ValueError) as exc:
            yield False, f"{each.finding.seen}: {exc}"


# -- sessions and their processes ----------------------------------------------------------------
def _sessions(store: str | None) -> Iterator[Leftover]:
    for path in stores(store):
        try:
            found = store_health.look(path, reads_sessions=False)
        except BanksmanError:
            # The check of the store reports the fault.
            continue
        left = () if found is None else found.left
        if not left:
            continue
        alive = [each for each in left if _pids(each)]
        names = ", ".join(_named(each) for each in left[:5]) + (" …" if len(left) > 5 else "")
        if alive:
            pids = ", ".join(
                f"{pid} ({name_of(pid)[:60]})" for each in alive for pid in _pids(each)
            )
            seen = f"processes of dead hosts are still running: {pids} (sessions: {names})"
            finding = wrong("leftovers", seen, _SWEEP)
        else:
            seen = f"{len(left)} sessions of dead hosts are not settled: {names}"
            finding = note("leftovers", seen, f"opening a session settles it; or run `{_SWEEP}`")
        yield Leftover(finding, lambda path=path, left=left: _settle(path, left))


def _named(each: UnsettledSession) -> str:
    return each.name or each.session


def _pids(each: UnsettledSession) -> list[int]:
    """Return the pids of the agent process and its keeper that certainly still run."""
    # Start times count from boot, so pid and start time identify a process only within one boot.
    if each.born is None or each.born[0] != orphans.boot_id():
        return []
    _, pid, started, keeper, keeper_started, *_ = each.born
    return [
        one for one, start in ((pid, started), (keeper, keeper_started)) if _is_there(one, start)
    ]


def _is_there(pid: int, started: int) -> bool:
    found = read_stat(pid) if pid else None
    # A zombie (Z) or a dead process (X) still has an entry in /proc, but runs nothing.
    return found is not None and found[2] == started and found[1] not in "ZX"


def _settle(path: Path, left: tuple[UnsettledSession, ...]) -> list[str]:
    """Open a host on the store.

    At its start it claims each session and ends the leftover processes. The host records this in
    the log of each session.
    """
    from banksman import Host  # noqa: PLC0415

    running = {each.session: [(pid, name_of(pid)[:60]) for pid in _pids(each)] for each in left}

    async def enter() -> None:
        async with Host(f"sqlite:{path}"):
            pass

    asyncio.run(enter())
    after = store_health.look(path, reads_sessions=False)
    still = {each.session for each in (after.left if after is not None else ())}
    told: list[str] = []
    for each in left:
        if each.session in still:
            raise BanksmanError(f"cannot settle session {_named(each)}", hint="see the lines above")
        ended = ", ".join(f"process {pid} ({name})" for pid, name in running[each.session])
        told.append(f"settled session {_named(each)}{f', ended {ended}' if ended else ''}")
    return told


# -- keepers -------------------------------------------------------------------------------------
def _keepers() -> Iterator[Leftover]:
    """Find keepers whose host is dead.

    The keeper ends the processes that are left, and then exits. A stopped keeper cannot.
    """
    for pid, host in living_keepers():
        # A reused pid makes a dead host look alive. Then the keeper is not reported, which is the
        # safe error.
        if _is_pid(host):
            continue
        found = read_stat(pid)
        if found is None:
            continue
        if found[1] in "Tt":
            seen = (
                f"keeper {pid} of the dead process {host} is stopped, "
                "and cannot end the leftover processes"
            )
            yield Leftover(wrong("leftovers", seen, f"kill -CONT {pid}"))
        else:
            seen = f"keeper {pid} is ending the leftover processes of the dead process {host}"
            yield Leftover(
                note(
                    "leftovers",
                    seen,
                    "wait: the keeper exits within the grace time of these processes",
                )
            )


def living_keepers() -> Iterator[tuple[int, int]]:
    """Yield the pid of each keeper of this user, with the pid of its host."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read(4096).split(b"\0")
        except OSError:
            continue  # The process ended meanwhile.
        # The argv of a keeper: the interpreter, its flags, the file, an fd, the pid of the host.
        if len(words) > 5 and words[3].endswith(_KEEPER.encode()) and words[5].isdigit():
            yield int(name), int(words[5])


def _is_pid(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


# -- files ---------------------------------------------------------------------------------------
def _sockets() -> Iterator[Leftover]:
    folder = sockets_folder()
    try:
        names = [name for name in os.listdir(folder) if name.endswith(sockets.SUFFIX)]
    except (FileNotFoundError, NotADirectoryError):
        return
    dead = [name for name in names if not sockets.is_alive(folder / name)]
    ours = [name for name in dead if name.startswith(f"{orphans.boot_id()[:8]}-")]
    if ours:
        seen = f"{len(ours)} sockets in {folder} have no listener"
        yield Leftover(
            note("leftovers", seen, _SWEEP),
            lambda: [f"removed {folder / name}" for name in sockets.sweep(folder)],
        )
    # If another machine shares this folder, its live sockets look dead from here. Only sockets of
    # this boot are removed.
    if len(dead) > len(ours):
        seen = (
            f"{len(dead) - len(ours)} sockets in {folder} are from before the last boot, "
            "or of another machine"
        )
        yield Leftover(note("leftovers", seen, "remove them, if no other machine uses this folder"))


def _announcement() -> Iterator[Leftover]:
    path = state_folder() / "server.json"
    try:
        content = path.read_bytes()[:_FILE_BYTES_MAX]
    except (FileNotFoundError, NotADirectoryError):
        return
    match _is_stale(content):
        case False:
            return
        case True:
            seen, fix = (
                f"{path} names a dead server",
                f"the next server replaces it; or run `{_SWEEP}`",
            )
            yield Leftover(note("leftovers", seen, fix), lambda: _remove(path, content))
        case None:
            seen = f"{path} names a server that does not answer, or is on another machine"
            fix = "the next server replaces it; or remove it, if no other machine uses this folder"
            yield Leftover(note("leftovers", seen, fix))


def _is_stale(content: bytes) -> bool | None:
    """Return whether the announced server is dead; None if that is uncertain.

    A dead server has no process and no listener. A server on another machine or in another
    container also looks dead from here. Only for a socket of this boot is the kernel's answer
    reliable.
    """
    from banksman.cli.client.discovery import announced, is_there  # noqa: PLC0415

    try:
        found: Any = json.loads(content)
    except ValueError:
        # A server is just writing the file, or the file is not an announcement.
        return False
    said = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    pid = said.get("pid")
    if not isinstance(pid, int) or _is_pid(pid):
        return False
    place = announced()
    if place is None or is_there(place):
        return False
    is_of_this_boot = os.path.basename(place.socket or "").startswith(f"{orphans.boot_id()[:8]}-")
    return True if is_of_this_boot else None


def _remove(path: Path, content: bytes) -> list[str]:
    """Remove the announcement if it is unchanged.

    Locks the folder as servers do, so that a new server's announcement is never removed.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.read_bytes()[:_FILE_BYTES_MAX] != content:
            return []
        path.unlink()
    except FileNotFoundError:
        return []
    finally:
        os.close(fd)
    return [f"removed {path}"]


def _spills() -> Iterator[Leftover]:
    folder = tempfile.gettempdir()
    dead = list(output.find_dead(folder))
    if dead:
        count, size = sum(len(each.files) for each in dead), sum(each.size for each in dead)
        seen = (
            f"{count} output files of commands, {_mib(size)}, in {folder}, "
            f"of {len(dead)} killed processes"
        )
        fix = f"the next process that needs such a file removes them; or run `{_SWEEP}`"
        yield Leftover(
            note("leftovers", seen, fix),
            lambda: [f"removed {path}" for each in dead for path in each.remove()],
        )
    yield from _old_spills(folder)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _old_spills(folder: str) -> Iterator[Leftover]:
    old: list[os.DirEntry[str]] = []
    size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(old) < SPILLS_MAX and _SPILL.fullmatch(entry.name) and _is_nobodys(entry):
                old.append(entry)
                # The entry caches the result of stat, so this is the size at the time of the check.
                size += entry.stat(follow_symlinks=False).st_size
    if old:
        seen = f"{len(old)} output files of commands, {_mib(size)}, in {folder}, older than a day"
        yield Leftover(
            note("leftovers", seen, _SWEEP), lambda: unlinked([entry.path for entry in old])
        )


def _is_nobodys(entry: os.DirEntry[str]) -> bool:
    """Return whether this is an old output file of an older version, and of no live host."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    is_ours = (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and stat.S_IMODE(found.st_mode) == 0o600
    )
    if not is_ours or found.st_mtime > time.time() - SPILL_SECONDS_MIN:
        return False
    # A host that started before the last write to the file may have made it, and a caller may still
    # ask that host for it.
    return all(born > found.st_mtime for born in _hosts_born())


def _hosts_born() -> list[float]:
    """Return the start time of each live host, found by its keepers.

    A host has a keeper from its first command on.
    """
    born: list[float] = []
    ticks = os.sysconf("SC_CLK_TCK")
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for _, host in living_keepers():
        found = read_stat(host)
        if found is not None:
            born.append(booted + found[2] / ticks)
    return born


def unlinked(paths: list[str]) -> Iterator[str]:
    """Remove files one by one and yield a description of each.

    A file that is already gone is fine. The first failure is raised after all files were tried.
    """
    failed: OSError | None = None
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as exc:
            failed = failed or exc
            continue
        yield f"removed {path}"
    if failed is not None:
        raise failed
