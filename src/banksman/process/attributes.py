"""Check and collect the attributes of a child: user, resource limits, inherited attributes.

This is the host's end, and it changes no child. `keeper/spawn.py` (on macOS `portable.py`) applies
the attributes. Only `raise_fd_limit` changes something: the limit of open files of this process.

**Another user.** A process that may change user and groups (root, or the capabilities for it) does
so in the child, just before exec(). Any other process needs a *helper*, a program with more
privileges such as `sudo -n`. The helper runs the command, and later runs `kill` for the processes
that the keeper may not signal. The creator of the host configures the helper, never a caller.

**Inheritance.** A child inherits from the zygote, a helper process that was started before the
call. The folder, the umask and the soft limit of open files are sent with each request. The other
attributes cannot be set from outside, or not safely: user and groups, capabilities, no_new_privs,
seccomp, limits, priority, CPUs. Together they form a *fingerprint*. If the fingerprint has changed
since the start of the zygote, a new zygote is started (`zygote_client.py`). A program that
restricts itself after its first command must not run the next command outside of that restriction.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from banksman.errors import UsageError, no_room
from banksman.process import syscalls

# uid, gid, groups, and the absolute path of the folder: the user must have the right to enter it.
Become = tuple[int, int, tuple[int, ...], bytes]
# Bits of the kernel's capability sets.
_SETGID, _SETUID = 1 << 6, 1 << 7
_SYS_NICE, _SYS_RESOURCE = 1 << 23, 1 << 24
# Root has it, unless a container or a service manager has taken it away.
_NEEDS_RESOURCE = "a hard limit above the current one needs CAP_SYS_RESOURCE"

_RLIMIT_NAMES = {
    name.removeprefix("RLIMIT_").lower(): number
    for name, number in vars(resource).items()
    if "RLIMIT_" in name
}
_RLIMIT_NUMBERS = tuple(sorted(set(_RLIMIT_NAMES.values())))
_RANGES = {"nice": (-20, 19), "oom_score_adj": (-1000, 1000)}
# Limits of a control group: see `cgroups.py`. The keeper sets them, and not the child.
CGROUP_RANGES: Mapping[str, tuple[float, float]] = {
    "memory_bytes": (1 << 20, 1 << 62),
    "swap_bytes": (0, 1 << 62),
    "processes": (1, 1 << 22),
    "cpus": (0.01, 4096),
    "cgroup": (1, 1),
}
# Added to the `oom_score_adj` of the host: a fifth of the memory of the machine.
_AGENTS_OOM_SCORE = 200
_NO_PRIORITY: dict[str, int | None] = dict.fromkeys(_RANGES)
# The soft limit that this process had before `raise_fd_limit`. Children get this limit.
_soft_before: int | None = None

# A uid has 32 bits.
_NUMBER = re.compile(r"[0-9]{1,10}")
# Lines of /proc/self/status: the umask, and those that belong to the fingerprint.
_UMASK = re.compile(rb"^Umask:\s*(\d+)", re.MULTILINE)
_FINGERPRINT = re.compile(
    rb"^(?:Uid|Gid|Groups|Cap(?:Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp(?:_filters)?|Cpus_allowed)"
    rb":.*",
    re.MULTILINE,
)


def find_user(user: object) -> pwd.struct_passwd:
    """Look up a user by name or number. A command line and a settings file have only text."""
    hint = "pass a user of this machine, by name or by number"
    try:
        if isinstance(user, str) and user:
            try:
                return pwd.getpwnam(user)
            except KeyError:
                # As chown does: a name of digits comes first.
                if _NUMBER.fullmatch(user) is None:
                    raise
                return pwd.getpwuid(int(user))
        if isinstance(user, int) and not isinstance(user, bool):
            return pwd.getpwuid(user)
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"there is no user {user!r:.100}", hint=hint) from None
    raise UsageError(f"user cannot be {user!r:.60}", hint=hint)


def user_name(uid: int | None) -> str:
    """Return the name of a user; None is the user of this process."""
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)  # For example in a container without /etc/passwd.


def is_our_user(user: pwd.struct_passwd) -> bool:
    """Whether this process already runs as this user."""
    return os.getuid() == os.geteuid() == user.pw_uid


def may_become_others() -> bool:
    """Whether this process may change to another user."""
    if sys.platform != "linux":
        return os.geteuid() == 0
    return _effective_capabilities() & (_SETGID | _SETUID) == _SETGID | _SETUID


def _effective_capabilities() -> int:
    try:
        # Read for the thread, because each thread has its own capabilities.
        status = syscalls.read_proc("thread-self/status", 8192)
    except OSError as exc:
        raise no_room("/proc", exc) from exc
    return next(
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(b"CapEff:")
    )


def become(user: pwd.struct_passwd, folder: bytes) -> Become:
    """Return the identity that a child takes on.

    The groups are looked up here, because the child must not query a directory service.
    """
    groups = tuple(os.getgrouplist(user.pw_name, user.pw_gid))
    return user.pw_uid, user.pw_gid, groups, os.path.abspath(folder)


def user_variables(user: pwd.struct_passwd) -> dict[bytes, bytes | None]:
    """Return the environment variables that name the user."""
    name = os.fsencode(user.pw_name)
    # As login(1) does. With an empty HOME, some programs take the current folder for it.
    return {b"HOME": os.fsencode(user.pw_dir) or b"/", b"USER": name, b"LOGNAME": name}


def words_by_helper(
    user: pwd.struct_passwd, words: tuple[bytes, ...], helper: Sequence[str]
) -> tuple[bytes, ...]:
    """Return the command that runs `words` as another user through the helper."""
    if not helper:
        raise UsageError(
            f"cannot run a command as {user.pw_name!r}: "
            "this process may not change its user, and the host has no user_helper",
            hint='pass Host(user_helper=("sudo", "-n")), and add a rule for it to sudoers',
        )
    return *(os.fsencode(word) for word in helper), b"-u", os.fsencode(user.pw_name), b"--", *words


def check_helper(helper: object) -> tuple[str, ...]:
    """Check the setting `user_helper` and return its words."""
    hint = 'pass the words that run a command as another user, such as ("sudo", "-n")'
    if helper is None:
        return ()
    if isinstance(helper, str | bytes) or not isinstance(helper, Sequence) or not helper:
        raise UsageError(f"user_helper cannot be {helper!r:.60}", hint=hint)
    words: list[str] = []
    for word in helper:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(word, str) or not word or "\0" in word:
            raise UsageError(f"user_helper cannot hold {word!r:.60}", hint=hint)
        words.append(word)
    return tuple(words)


def parse_limits(
    limits: Mapping[Any, Any] | None, *, is_agents: bool = False
) -> dict[str, Any] | None:
    """Parse limits such as `{"nofile": 64, "as": (soft, hard), "nice": 5, "oom_score_adj": 500}`.

    A key is the name of an rlimit (`nofile` or `RLIMIT_NOFILE`), a number of the `resource` module,
    `nice` (absolute) or `oom_score_adj`. One number sets the soft and the hard limit. The limits of
    a control group (`CGROUP_RANGES`) are only checked: `cgroups.order` has them. The
    result has the form that the keeper takes.

    `is_agents`: the kernel ends an agent before its host when memory runs out, unless the limits
    say something else. Anybody may raise `oom_score_adj`.
    """
    is_agents = is_agents and sys.platform == "linux"
    if limits is None and is_agents:
        limits = {}
    if limits is None:
        return None
    if not isinstance(limits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = 'pass a mapping such as {"nofile": 64, "nice": 5}'
        raise UsageError(f"limits cannot be {limits!r:.60}", hint=hint)
    rlimits: dict[int, tuple[int, int]] = {}
    others: dict[str, int | None] = dict(_NO_PRIORITY)
    for key, value in limits.items():
        if key in _RANGES:
            others[key] = _number(key, value, *_RANGES[key])
        elif key in CGROUP_RANGES:
            _number(key, value, *CGROUP_RANGES[key], kind=float if key == "cpus" else int)
        else:
            number = _rlimit(key)
            if number in rlimits:
                hint = "state each limit once: a name, RLIMIT_… and a number can mean the same"
                raise UsageError(f"limit {key!r:.60} is there twice", hint=hint)
            rlimits[number] = _pair(key, value)
    if is_agents and others["oom_score_adj"] is None:
        own = int(syscalls.read_proc("self/oom_score_adj", 32))
        others["oom_score_adj"] = min(own + _AGENTS_OOM_SCORE, _RANGES["oom_score_adj"][1])
    is_plain = not rlimits and others == _NO_PRIORITY
    return None if is_plain else {"rlimits": list(rlimits.items()), **others}


def check_allowed(limits: Mapping[str, Any] | None) -> None:
    """Raise `UsageError` if the kernel refuses these parsed limits to this process.

    The keeper would fail in the same way, but only when the process starts. So nothing is refused
    if /proc cannot be read.
    """
    if limits is not None and sys.platform == "linux":
        with contextlib.suppress(OSError):
            _check_allowed(limits)


def _check_allowed(limits: Mapping[str, Any]) -> None:
    has = _effective_capabilities()
    for number, (_, hard) in limits["rlimits"]:
        name = next(name for name, known in _RLIMIT_NAMES.items() if known == number)
        most, hint = resource.getrlimit(number)[1], _NEEDS_RESOURCE
        if has & _SYS_RESOURCE:
            if number != resource.RLIMIT_NOFILE:
                continue
            most = int(syscalls.read_proc("sys/fs/nr_open", 32))
            hint = "this is the most that the kernel allows: see /proc/sys/fs/nr_open"
        if most != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or hard > most):
            _refuse(name, hard, f"at most {most}; {hint}")
    nice, score = limits["nice"], limits["oom_score_adj"]
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)
    least_nice = min(own_nice, 20 - min(resource.getrlimit(resource.RLIMIT_NICE)[0], 40))
    if nice is not None and nice < least_nice and not has & _SYS_NICE:
        _refuse("nice", nice, f"at least {least_nice}; less needs CAP_SYS_NICE")
    if score is None or has & _SYS_RESOURCE:
        return
    # A process that has raised its score may lower it again, usually to 0.
    least_score = min(int(syscalls.read_proc("self/oom_score_adj", 32)), 0)
    if score < least_score:
        _refuse("oom_score_adj", score, f"at least {least_score}; less needs CAP_SYS_RESOURCE")


def _refuse(name: str, value: int, allowed: str) -> NoReturn:
    raise UsageError(f"cannot set the limit {name} to {value}", hint=f"pass {allowed}")


def named_limits(limits: Any) -> dict[str, float | list[int]]:
    """Check limits, and return them by name and as plain JSON, as `parse_limits` takes them."""
    parse_limits(limits)
    return {
        _limit_name(key): value if isinstance(value, int | float) else list(value)
        for key, value in limits.items()
    }


def _limit_name(key: str | int) -> str:
    if key in _RANGES or key in CGROUP_RANGES:
        return str(key)
    number = _rlimit(key)
    name = next(name for name, known in _RLIMIT_NAMES.items() if known == number)
    # `nice` is a priority, and RLIMIT_NICE its lowest value.
    return f"rlimit_{name}" if name in _RANGES else name


def _rlimit(key: Any) -> int:
    number = _RLIMIT_NAMES.get(key.lower().removeprefix("rlimit_")) if isinstance(key, str) else key
    # A bool and a float can be equal to a number.
    if type(number) is not int or number not in _RLIMIT_NUMBERS:
        known = ", ".join((*_RANGES, *CGROUP_RANGES, *sorted(_RLIMIT_NAMES)))
        hint = f"use one of: {known}"
        raise UsageError(f"there is no limit {key!r:.60}", hint=hint)
    return number


def _pair(key: Any, value: Any) -> tuple[int, int]:
    # JSON has lists and no tuples.
    is_pair = isinstance(value, tuple | list)
    pair = cast(Sequence[Any], value if is_pair else (value, value))
    if len(pair) != 2:
        hint = "pass one whole number, or a pair (soft, hard)"
        raise UsageError(f"limit {key!r:.60} cannot be {value!r:.100}", hint=hint)
    soft, hard = (_number(key, number, resource.RLIM_INFINITY, (1 << 63) - 1) for number in pair)
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        hint = "pass a soft limit that is not above the hard limit"
        raise UsageError(f"limit {key!r:.60} cannot be {value!r:.100}", hint=hint)
    return soft, hard


def _number(key: object, value: Any, least: float, most: float, *, kind: type[float] = int) -> Any:
    # An int is a float to a caller, and not to `isinstance`.
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        hint = f"pass a {'whole ' if kind is int else ''}number from {least} to {most}"
        raise UsageError(f"limit {key!r:.60} cannot be {value!r:.100}", hint=hint)
    return value


def raise_fd_limit() -> int:
    """Raise this process's soft limit of open files to its hard limit, and return it.

    Children keep the old limit. A running command takes three or four fds in this process.
    Banksman's programs call this, and so should programs that start hundreds of commands. A library
    does not do it without being asked, because a program that uses select() breaks on fds over
    1023.
    """
    global _soft_before  # noqa: PLW0603
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _soft_before = soft
    return hard


def child_nofile() -> int:
    """Return the soft limit of open files for a child: the limit before `raise_fd_limit`."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _soft_before is None else _soft_before


@dataclass(frozen=True, slots=True)
class InheritedAttributes:
    """Attributes that a child inherits from the thread that starts it."""

    umask: int
    nofile: int
    fingerprint: object


def take_inherited() -> InheritedAttributes:
    """Read the attributes of the current thread."""
    if sys.platform != "linux":
        # The only way to read the umask is to set it. There is no zygote here that could be
        # outdated.
        umask = os.umask(0o077)
        os.umask(umask)
        return InheritedAttributes(umask, child_nofile(), None)
    try:
        # Read for the thread, not the process: each thread has its own capabilities and seccomp
        # filters.
        status = syscalls.read_proc("thread-self/status", 8192)
        oom = syscalls.read_proc("self/oom_score_adj", 32)
    except OSError as exc:
        raise no_room("/proc", exc) from exc
    umask = _UMASK.search(status)
    assert umask is not None, "the kernel has had this line since 4.7"
    # The soft limit of open files is sent with the order, so only the hard limit is part of the
    # fingerprint.
    rlimits = tuple(
        resource.getrlimit(which)[which == resource.RLIMIT_NOFILE :] for which in _RLIMIT_NUMBERS
    )
    priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), oom
    fingerprint = _FINGERPRINT.findall(status), rlimits, priority
    return InheritedAttributes(int(umask[1], 8), child_nofile(), fingerprint)
