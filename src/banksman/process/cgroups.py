"""Control groups (v2) on this machine: where they can be made, what they limit, and their usage.

A limit of a whole process tree needs a control group: `memory_bytes`, `swap_bytes`, `processes` and
`cpus`. `cgroup=1` asks for a group without a limit, for its usage and its kill. The keeper of the
tree makes the group (`keeper/cgroup.py`). This module checks first whether that is possible. A
limit that cannot be set is an error, never silence.

**Where.** Groups of trees are made inside the host's own group, the *base*. The kernel has two
rules for that:
- This user may write there: systemd delegates a group (`Delegate=yes`), or the user is root.
- A group that limits its inner groups has no process in it, unless it is the root group. So a host
  lives one level deeper, in a group of the name `HOST`, and the base is the group around it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from banksman.errors import UsageError
from banksman.process import syscalls
from banksman.process.keeper.cgroup import PREFIX

if TYPE_CHECKING:
    from banksman.process.keeper.cgroup import Setting

    # The base of a group, and its settings.
    Order = tuple[str, tuple[Setting, ...]]

# The group of a host: `DelegateSubgroup=` of systemd, or made by a script before its start.
HOST = "banksman-host"
# The controllers that limit or measure a tree. All that exist are used in every group.
CONTROLLERS = ("memory", "pids", "cpu")
# What a unit of systemd needs: docs/systemd.md.
UNIT = "Delegate=cpu memory pids"
# The limits that need a group, with the controllers for each.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "memory_bytes": ("memory",),
    "swap_bytes": ("memory",),
    "processes": ("pids",),
    "cpus": ("cpu",),
    "cgroup": (),
}
_CPU_PERIOD_MICROSECONDS = 100_000
# All files but the list of the processes are shorter. Of that one only the beginning counts.
_FILE_BYTES_MAX = 65536

# There while systemd is the service manager: `sd_booted(3)`.
_SYSTEMD = "/run/systemd/system"
# What systemd writes to the group of a unit that it has delegated. Only root can read it.
_DELEGATED = "trusted.delegate"
_UNITS = (".service", ".scope", ".slice")

_pruned: set[str] = set()


class _Impossible(Exception):
    """There can be no such group here. The text is the reason, `hint` what to do."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupUsage:
    """Control group of a process tree: its usage and its limits.

    `path`: where it is mounted. A value is None if the group does not measure or limit it.
    `out_of_memory_kills`: how many of its processes the kernel has killed because memory ran out.
    """

    path: str
    memory_bytes: int | None = None
    memory_bytes_peak: int | None = None
    memory_bytes_max: int | None = None
    processes: int | None = None
    processes_max: int | None = None
    cpu_seconds: float | None = None
    cpus_max: float | None = None
    out_of_memory_kills: int | None = None


def needs_cgroup(limits: Mapping[Any, Any] | None) -> bool:
    """Whether one of the limits needs a control group."""
    return bool(limits_of_group(limits))


def limits_of_group(limits: Mapping[Any, Any] | None) -> list[str]:
    """Return the names of the limits that need a control group."""
    return sorted(name for name in limits or () if name in _NEEDS)


def order(limits: Mapping[Any, Any] | None) -> Order | None:
    """Return the group that these limits need, for a keeper; None if they need none.

    Raises `UsageError` if it cannot be made here.
    """
    wanted = {name: value for name, value in (limits or {}).items() if name in _NEEDS}
    if not wanted:
        return None
    needed = {controller for name in wanted for controller in _NEEDS[name]}
    try:
        base, lacking = _base(needed)
        for name in lacking:
            _enable(base, name, is_needed=name in needed)
    except _Impossible as exc:
        message = f"cannot set the limits {', '.join(sorted(wanted))}: {exc}"
        raise UsageError(message, hint=f"{exc.hint}; `banksman doctor` shows the state") from None
    return base, _settings(wanted)


def takes_turn_to_prune(base: str) -> bool:
    """Whether the next keeper looks for groups of dead keepers: the first one of this process."""
    is_first = base not in _pruned
    _pruned.add(base)
    return is_first


def prune_again() -> None:
    """Have the next keeper look for groups of dead keepers: one has just been lost."""
    _pruned.clear()


def why_not(controllers: Collection[str] = CONTROLLERS) -> tuple[str, str] | None:
    """Return why a tree cannot have a group with these controllers, and what to do.

    Changes nothing.
    """
    try:
        _base(controllers)
    except _Impossible as exc:
        return str(exc), exc.hint
    return None


def base_folder() -> str:
    """Return the folder in which groups are made. Call it only if `why_not(())` is None."""
    return _base(())[0]


def is_undelegated(base: str) -> bool:
    """Whether systemd owns this base, and has not delegated it to this host.

    The kernel lets root write everywhere, so `why_not` cannot see it. It asks only for the nearest
    unit: a delegated manager of units does not delegate each of them. False for another user: it
    can write only where somebody has allowed it.
    """
    if os.geteuid() != 0 or not os.path.isdir(_SYSTEMD):
        return False
    mount = _mount()[0]
    while base != mount and not base.endswith(_UNITS):
        base = os.path.dirname(base)
    try:
        return syscalls.getxattr(base, _DELEGATED) != b"1"
    except OSError:
        return True


def usage(pid: int) -> CgroupUsage | None:
    """Return the group that was made for the tree of this process; None if there is none."""
    try:
        mount, root = _mount()
        path = mount + _relative(f"{pid}/cgroup", root)
        base = _host_base(mount, root)
    except (OSError, _Impossible):
        return None
    # This host may itself be in the tree of another one. A process that another host has started
    # may be outside of the base.
    start = len(base) if f"{path}/".startswith(f"{base}/") else 0
    # The process may be in a group that the command has made inside of its own.
    head, found, tail = path[start:].partition(f"/{PREFIX}")
    if not found:
        return None
    path = path[:start] + head + found + tail.partition("/")[0]
    quota, _, period = (_read(path, "cpu.max") or "max").partition(" ")
    return CgroupUsage(
        path=path,
        memory_bytes=_number(path, "memory.current"),
        memory_bytes_peak=_number(path, "memory.peak"),
        memory_bytes_max=_number(path, "memory.max"),
        processes=_number(path, "pids.current"),
        processes_max=_number(path, "pids.max"),
        cpu_seconds=None
        if (used := _field(path, "cpu.stat", "usage_usec")) is None
        else used / 1e6,
        cpus_max=int(quota) / int(period) if quota.isdigit() else None,
        out_of_memory_kills=_field(path, "memory.events", "oom_kill"),
    )


# -- what the limits need --------------------------------------------------------------------------
def _settings(wanted: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the files of the group and their values."""
    found: list[Setting] = []
    if "memory_bytes" in wanted:
        found.append(("memory.max", str(wanted["memory_bytes"]), True))
        # One process of a tree that is over its limit is rarely the culprit alone, and the rest of
        # the tree seldom copes without it. So the kernel ends all of it.
        found.append(("memory.oom.group", "1", False))
    if "memory_bytes" in wanted or "swap_bytes" in wanted:
        # A tree at its limit must not make the machine swap. Without swap there is no such file.
        is_needed = wanted.get("swap_bytes", 0) > 0
        found.append(("memory.swap.max", str(wanted.get("swap_bytes", 0)), is_needed))
    if "processes" in wanted:
        found.append(("pids.max", str(wanted["processes"]), True))
    if "cpus" in wanted:
        quota = max(1000, int(wanted["cpus"] * _CPU_PERIOD_MICROSECONDS))
        found.append(("cpu.max", f"{quota} {_CPU_PERIOD_MICROSECONDS}", True))
    return tuple(found)


# -- where -----------------------------------------------------------------------------------------
def _base(needed: Collection[str]) -> tuple[str, list[str]]:
    """Return the folder in which groups are made, and the controllers to enable there.

    Raises `_Impossible` if no group can be made there, or a needed controller is missing.
    """
    if sys.platform != "linux":
        raise _Impossible("control groups exist only on Linux", "use rlimits, such as `as`")
    base = _host_base(*_mount())
    if _is_read_only(base):
        # For root this is the usual reason: a container without a group of its own.
        hint = "mount cgroup v2 for writing, for example with a private cgroup namespace"
        raise _Impossible(f"{base} is mounted read-only", hint)
    if not os.access(base, os.W_OK) or not os.access(f"{base}/cgroup.procs", os.W_OK):
        hint = f"give this service its own group: {UNIT} in its unit"
        raise _Impossible(f"this user may not write to {base}", hint)
    available = (_read(base, "cgroup.controllers") or "").split()
    missing = [name for name in CONTROLLERS if name in needed and name not in available]
    if missing:
        known = ", ".join(available) or "none"
        hint = f"delegate it ({UNIT} in a unit of systemd), or boot with cgroup v2 alone"
        raise _Impossible(
            f"{base} has no {' and no '.join(missing)} controller (it has {known})", hint
        )
    return base, _lacking(base, available, needed)


def _is_read_only(base: str) -> bool:
    try:
        return bool(syscalls.statvfs(base).f_flag & os.ST_RDONLY)
    except OSError:
        return False  # It is not there.


def _host_base(mount: str, root: str) -> str:
    """Return the folder in which groups of this host would be made."""
    base = (mount + _relative("self/cgroup", root)).rstrip("/")
    return os.path.dirname(base) if os.path.basename(base) == HOST else base


def _lacking(base: str, available: Collection[str], needed: Collection[str]) -> list[str]:
    """Return the available controllers that are not enabled for the inner groups of the base.

    Raises `_Impossible` if a needed one cannot be enabled.
    """
    enabled = (_read(base, "cgroup.subtree_control") or "").split()
    lacking = [name for name in CONTROLLERS if name in available and name not in enabled]
    # The root group has no type, and may have processes.
    is_root = _read(base, "cgroup.type") is None
    is_needed = any(name in needed for name in lacking)
    if is_needed and not is_root and _read(base, "cgroup.procs"):
        hint = f"start this host in a group of its own: {UNIT} DelegateSubgroup={HOST} in its unit"
        names = " and ".join(lacking)
        raise _Impossible(f"cannot enable {names} in {base}: there are processes in it", hint)
    return [] if not is_root and _read(base, "cgroup.procs") else lacking


def _enable(base: str, name: str, *, is_needed: bool) -> None:
    """Enable a controller for the inner groups of the base."""
    try:
        _write(f"{base}/cgroup.subtree_control", f"+{name}")
    except OSError as exc:
        if is_needed:
            hint = "see `cgroup.subtree_control` in the documentation of the kernel"
            reason = f"cannot enable {name} in {base}: {exc.strerror}"
            raise _Impossible(reason, hint) from exc


def _mount() -> tuple[str, str]:
    """Return where cgroup v2 is mounted, and which group is at the top of that mount."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields, _, kind = line.partition(" - ")
                if kind.startswith("cgroup2 "):
                    _, _, _, root, mount, *_ = fields.split(" ")
                    return mount.rstrip("/"), root.rstrip("/")
    except OSError as exc:
        raise _Impossible(f"cannot read the mounts: {exc.strerror}", "mount /proc") from exc
    hint = "mount it: mount -t cgroup2 none /sys/fs/cgroup"
    raise _Impossible("cgroup v2 is not mounted", hint)


def _relative(file: str, root: str) -> str:
    """Return the group of a process, as a path below the mount. `file`: below /proc."""
    lines = syscalls.read_proc(file, 65536).decode(errors="surrogateescape").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None or not f"{own}/".startswith(f"{root}/"):
        raise _Impossible("the own group is outside of the mount", "mount cgroup v2 again")
    return own.removeprefix(root).rstrip("/")


# -- files -----------------------------------------------------------------------------------------
def _read(folder: str, name: str) -> str | None:
    try:
        fd = syscalls.open_fd(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # No such controller, or the group is gone.
    try:
        return syscalls.read(fd, _FILE_BYTES_MAX).decode("ascii").strip()
    except OSError:
        return None  # The same, a moment later.
    finally:
        syscalls.close(fd)


def _write(path: str, value: str) -> None:
    fd = syscalls.open_fd(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        syscalls.write(fd, value.encode("ascii"))
    finally:
        syscalls.close(fd)


def _number(folder: str, name: str) -> int | None:
    text = _read(folder, name)
    return int(text) if text is not None and text.isdigit() else None  # Else it says `max`.


def _field(folder: str, name: str, key: str) -> int | None:
    lines = (_read(folder, name) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), None)
