"""Check this machine: kernel, /proc, Python, packages, fd limit, locale and temporary folder.

One check runs a command that leaves a process behind, and expects that process to be ended. `room`
checks the free space of a disk, also for `stores.py`.
"""

from __future__ import annotations

import asyncio
import locale
import os
import platform
import resource
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata

import banksman
from banksman.cli.doctor import Check, DoctorOptions, Finding, note, ok, wrong
from banksman.errors import BanksmanError
from banksman.process import cgroups, syscalls
from banksman.runtime.execute import execute

# An agent with its pipes takes about ten fds. A server needs one per client.
FDS_LOW = 1024
# With less free space the next write may fail.
FREE_BYTES_MIN = 100 << 20
FREE_BYTES_LOW = 1 << 30
TRIAL_SECONDS_MAX = 20.0
# Packages that `banksman serve` needs, and every verb that finds no server.
SERVER_PACKAGES = ("msgspec", "starlette", "uvicorn", "httptools", "prometheus-client")
# Packages that a shared store needs. The check of the store reports a missing one, if a store of
# this kind is configured.
CLUSTER_PACKAGES = ("nats-py",)


def checks(_: DoctorOptions) -> list[Check]:
    return [
        *(kernel, processes, trial, control_groups, python, packages, fds, words),
        temporary_folder,
    ]


def kernel() -> Iterator[Finding]:
    """Check for pidfds."""
    release = f"{platform.system()} {platform.release()}"
    if sys.platform != "linux":
        seen = f"{release}: a child that calls setsid may outlive its host"
        yield note("kernel", seen, "use Linux, where every child is ended")
        return
    try:
        os.close(syscalls.pidfd_open(os.getpid()))
    except OSError as exc:
        fix = "use Linux 5.4 or newer, and a sandbox that allows pidfd_open"
        yield wrong("kernel", f"{release}, without pidfd_open: {exc.strerror}", fix)
        return
    yield ok("kernel", f"{release}, with pidfds")


def processes() -> Iterator[Finding]:
    """Check /proc, from which Banksman reads the members of a process tree."""
    if sys.platform != "linux":
        return
    if os.readlink("/proc/self") != str(os.getpid()):
        fix = "mount the right one: mount -t proc proc /proc, or unshare --mount-proc"
        yield wrong("/proc", "it belongs to another pid namespace", fix)
        return
    pids = sum(name.isdigit() for name in os.listdir("/proc"))
    if not os.path.exists(f"/proc/{os.getppid()}/stat") and os.getppid():
        seen = f"{pids} processes are visible, but not the parent of this process"
        yield note(
            "/proc",
            seen,
            "/proc is mounted with hidepid: processes of other users cannot be seen or ended",
        )
        return
    yield ok("/proc", f"{pids} processes are visible")


def trial() -> Iterator[Finding]:
    """Run a command that leaves a process behind, and check that the process is ended with it."""
    name = "trial"
    if shutil.which("sh") is None or shutil.which("sleep") is None:
        yield note(name, "not run: sh or sleep is not on PATH")
        return
    # The child ignores HUP and TERM.
    script = "(trap '' HUP TERM; exec sleep 300) >/dev/null 2>&1 & echo done"
    fix = "in a container or a sandbox, allow prctl, pidfd_open and AF_UNIX sockets"
    try:
        finished = asyncio.run(
            execute(
                ["sh", "-c", script],
                timeout=TRIAL_SECONDS_MAX,
                grace=0.2,
                linger=0.0,
                scrub=("secrets", "banksman"),
            )
        )
    except BanksmanError as exc:
        yield wrong(name, f"cannot run a command: {exc.args[0]}", exc.hint or fix)
        return
    if finished.stdout.text.strip() != "done" or finished.code != 0:
        yield wrong(name, f"a command ended with {finished.ended.value}, code {finished.code}", fix)
    elif finished.survivors:
        left = ", ".join(f"{each.pid} ({each.why})" for each in finished.survivors)
        yield wrong(name, f"cannot end the processes that a command left running: {left}", fix)
    elif not finished.swept:
        yield wrong(name, "the process that a command left running was not found", fix)
    else:
        yield ok(
            name,
            "a command, and the process that it left running, "
            f"were ended in {finished.seconds:.1f} s",
        )


def control_groups() -> Iterator[Finding]:
    """Check whether a tree can have a control group, and which of its limits."""
    name = "control groups"
    why = cgroups.why_not(())
    if why is not None:
        yield note(name, f"none: {why[0]}; limits of a whole tree are refused", why[1])
        return
    lacking = cgroups.why_not()
    if lacking is None and cgroups.is_undelegated(cgroups.base_folder()):
        seen = (
            f"{cgroups.base_folder()} belongs to systemd: root can make groups there, "
            "and systemd may take their limits back at any time"
        )
        yield note(name, seen, f"run the host in a unit with {cgroups.UNIT}")
    elif lacking is None:
        seen = f"{cgroups.base_folder()}: memory, processes and CPUs of a tree can be limited"
        yield ok(name, seen)
    else:
        yield note(name, f"{lacking[0]}; the limits that need it are refused", lacking[1])


def python() -> Iterator[Finding]:
    """Report the versions of Python and SQLite."""
    seen = (
        f"{platform.python_implementation()} {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}"
    )
    yield ok("python", f"{seen}, {sys.executable}")


def packages() -> Iterator[Finding]:
    """Check that the packages of the server are installed."""
    found: dict[str, str | None] = {}
    for name in (*SERVER_PACKAGES, *CLUSTER_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    missing = [name for name in SERVER_PACKAGES if found[name] is None]
    seen = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    ours = f"banksman {banksman.__version__}"
    if missing:
        fix = "pip install 'banksman[server]'"
        needed = (
            f"not installed: {', '.join(missing)} (needed by serve, and by verbs without a server)"
        )
        yield note("packages", f"{ours}; {needed}", fix)
    else:
        yield ok("packages", f"{ours}, {seen}")


def fds() -> Iterator[Finding]:
    """Check the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    seen = f"soft limit {soft}, hard limit {many}"
    # The hard limit counts, because a server raises its soft limit to it.
    if hard != resource.RLIM_INFINITY and hard < FDS_LOW:
        fix = (
            "raise the hard limit (ulimit -Hn, or LimitNOFILE= of a unit): each client needs an fd"
        )
        yield wrong("fd limit", seen, fix)
    else:
        yield ok("fd limit", seen)


def words() -> Iterator[Finding]:
    """Check that the locale is UTF-8."""
    spoken = (
        locale.getencoding()
        if hasattr(locale, "getencoding")
        else locale.getpreferredencoding(do_setlocale=False)
    )
    if spoken.lower().replace("-", "") not in ("utf8", "utf_8"):
        yield note(
            "locale",
            f"{spoken}: characters that it lacks are shown as escapes",
            "export LC_ALL=C.UTF-8",
        )
    else:
        yield ok("locale", spoken)


def temporary_folder() -> Iterator[Finding]:
    """Check that the temporary folder can be written and has free space."""
    folder = tempfile.gettempdir()
    if not os.access(folder, os.W_OK | os.X_OK):
        yield wrong(
            "temporary folder", f"cannot write to {folder}", "set TMPDIR to a writable folder"
        )
        return
    yield room("temporary folder", folder)


def room(name: str, folder: str) -> Finding:
    """Check the free space on the disk of a folder."""
    free = shutil.disk_usage(folder).free
    seen = f"{folder}, {free / (1 << 30):.1f} GiB free"
    if free < FREE_BYTES_MIN:
        return wrong(name, seen, "free some space on that disk")
    if free < FREE_BYTES_LOW:
        return note(name, seen, "free some space on that disk before it is full")
    return ok(name, seen)
