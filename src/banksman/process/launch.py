"""Check and prepare a launch: argv, environment, folder and fds of a child, before it starts.

A bad call raises an error here, and nothing is started. `program.py` checks the words and the
folder, and `attributes.py` the user and the limits. `process.py` (on macOS `portable.py`)
starts the child.

A child inherits the environment of this process, minus the scrubbed variables, plus the variables
in `env`. `scrub` accepts three policies, and names of variables:
- `"banksman"` removes Banksman's variables (`BANKSMAN_…`). They may hold the token of a server or
  the address of a store. Agents never inherit them.
- `"nesting"` removes the variables by which an agent notices that it runs inside another agent. It
  may then behave differently or refuse to start.
- `"secrets"` removes credentials, by the list and the endings below. It helps against accidental
  leaks and is no security boundary.
- Any other word names one variable.

`keep` names variables that "nesting" and "secrets" leave alone, such as the key of an agent's
provider. Variables that the caller puts into `env` are always kept.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from banksman.errors import UsageError
from banksman.process import attributes, cgroups, syscalls
from banksman.process.attributes import Become, InheritedAttributes
from banksman.process.program import argv_words, resolve_program, working_folder

NESTING = frozenset(
    (
        *("CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_SSE_PORT", "CLAUDE_CODE_SESSION_ID"),
        *(
            "CLAUDE_CODE_CHILD_SESSION",
            "CLAUDE_AGENT_SDK_VERSION",
            "CODEX_SANDBOX",
            "CODEX_SANDBOX_NETWORK_DISABLED",
        ),
        *(
            "CODEX_THREAD_ID",
            "GEMINI_CLI",
            "GEMINI_CLI_NO_RELAUNCH",
            "QWEN_CODE",
            "QWEN_CODE_NO_RELAUNCH",
        ),
        *("OPENCODE", "OPENCODE_PID", "COPILOT_CLI", "GOOSE_TERMINAL"),
    )
)
SECRETS = frozenset(
    (
        *(
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        *(
            "DATABASE_URL",
            "PGPASSWORD",
            "MYSQL_PWD",
            "NPM_TOKEN",
            "SSH_AUTH_SOCK",
            "GPG_AGENT_INFO",
        ),
    )
)
SECRET_ENDINGS = (
    "_API_KEY",
    "_TOKEN",
    "_SECRET",
    "_PASSWORD",
    "_PASSWD",
    "_CREDENTIALS",
    "_PRIVATE_KEY",
)

# The answers for the variables of an environment. All agents of a host inherit the same one.
NAMES_KEPT_MAX = 4096

_NOTHING: Mapping[bytes, bytes | None] = {}

# Variables for a child with a terminal: a type that all programs know, and no size, because the
# size in this environment belongs to another terminal.
TERMINAL: dict[bytes, bytes | None] = {b"TERM": b"xterm-256color", b"LINES": None, b"COLUMNS": None}


def build(
    env: Mapping[str, str] | None,
    *,
    inherit: bool,
    scrub: Iterable[str] = (),
    keep: Iterable[str] = (),
    ours: Mapping[bytes, bytes | None] = _NOTHING,
) -> dict[bytes, bytes]:
    """Build the complete environment of the child, as the kernel takes it.

    `ours`: overrides inherited variables; None removes one. `env`: overrides both.
    """
    words = _scrub_words(scrub)
    # Read os.environb at the time of the call, not an earlier copy: the program may have changed
    # it.
    built = dict(os.environb) if inherit else {}
    if words:
        kept = frozenset(keep)
        built = {
            name: value for name, value in built.items() if not _is_scrubbed(name, words, kept)
        }
    for name, value in ours.items():
        built.pop(name, None)
        if value is not None:
            built[name] = value
    for name, value in _checked(env).items():
        try:
            built[os.fsencode(name)] = os.fsencode(value)
        except UnicodeEncodeError as exc:
            hint = "pass text that can be encoded; see sys.getfilesystemencoding()"
            # Without the value: it may be a secret.
            message = f"env cannot hold {name!r}: its name or value cannot be encoded"
            raise UsageError(message, hint=hint) from exc
    return built


def removed_secrets(built: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Return the variables of this process that may hold secrets and that a child does not get."""
    return tuple(
        sorted(
            name for name in os.environ if may_be_secret(name) and os.fsencode(name) not in built
        )
    )


def _scrub_words(scrub: Any) -> frozenset[str]:
    hint = 'pass a list of "banksman", "nesting", "secrets" and names of variables'
    if isinstance(scrub, str) or not isinstance(scrub, Iterable):
        raise UsageError(f"scrub cannot be {scrub!r}", hint=hint)
    words = frozenset(cast(Iterable[Any], scrub))
    for word in words:
        if not isinstance(word, str):
            raise UsageError(f"scrub cannot hold {word!r}", hint=hint)
    return words


@functools.lru_cache(NAMES_KEPT_MAX)
def _is_scrubbed(variable: bytes, scrub: frozenset[str], keep: frozenset[str]) -> bool:
    name = os.fsdecode(variable)
    # `keep` may not open what has to be closed: a variable named by `scrub`, and Banksman's own.
    if name in scrub or ("banksman" in scrub and name.startswith("BANKSMAN_")):
        return True
    if name in keep:
        return False
    return ("nesting" in scrub and name in NESTING) or ("secrets" in scrub and may_be_secret(name))


@functools.lru_cache(NAMES_KEPT_MAX)
def may_be_secret(name: str) -> bool:
    """Whether the policy "secrets" removes the variable of this name."""
    return name in SECRETS or name.upper().endswith(SECRET_ENDINGS)


def _checked(env: Any) -> Mapping[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        hint = "pass a mapping of names to values, both text"
        raise UsageError(f"env cannot be {env!r:.60}", hint=hint)
    items = cast(Mapping[Any, Any], env)
    for name, value in items.items():
        if not isinstance(name, str) or not isinstance(value, str):
            kind = type(value).__name__
            message = f"env cannot hold {name!r} with a value of type {kind}: both must be text"
            raise UsageError(message, hint="write numbers and paths as str(…)")
        if not name or "=" in name or "\0" in name or "\0" in value:
            hint = "pass a name that is not empty and has no = or NUL, and a value without NUL"
            raise UsageError(f"env cannot hold the variable {name!r}", hint=hint)
    return items


Argv = Sequence[str | bytes | os.PathLike[str]]
# Target of an output stream: a pipe to the host, /dev/null, the target of stdout, a copy of this
# fd, or the file at this path.
Target = Literal["pipe", "null", "stdout"] | int | bytes
PIPES: tuple[Target, Target] = ("pipe", "pipe")
# Source of stdin: /dev/null, a pipe from the host, the host's own stdin, or a copy of this fd.
Source = Literal["null", "pipe", "inherit"] | int


@dataclass(frozen=True, slots=True)
class Launch:
    """A checked order for one child. All strings are in the form that the kernel takes."""

    path: bytes
    argv: tuple[bytes, ...]
    env: dict[bytes, bytes]
    cwd: bytes
    inherited: InheritedAttributes
    limits: dict[str, Any] | None
    pass_fds: tuple[int, ...]
    # `user`: the user to become before the start. `ender`: the command that signals processes of
    # other users, up to and including `kill`.
    user: Become | None = None
    ender: tuple[bytes, ...] | None = None
    # The child works for an agent. Its keeper has another name then, and the sockets of this user
    # refuse its tree.
    is_agents: bool = False
    # The control group of the tree; None: it has none.
    cgroup: cgroups.Order | None = None


def prepare(
    argv: Argv,
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    scrub: Iterable[str] = (),
    keep: Iterable[str] = (),
    limits_wanted: Mapping[Any, Any] | None = None,
    pass_fds: Sequence[int] = (),
    has_terminal: bool = False,
    user: str | int | None = None,
    helper: Sequence[str] = (),
    is_agents: bool = False,
) -> Launch:
    """Check a call and return the order for it.

    `helper`: a program that runs commands with more privileges, such as `sudo -n`; see
    `attributes.py`.
    """
    words = argv_words(argv)
    folder = working_folder(cwd)
    ours: dict[bytes, bytes | None] = dict(TERMINAL) if has_terminal else {}
    become: Become | None = None
    if user is not None:
        other = attributes.find_user(user)
        if attributes.is_our_user(other):
            ours |= attributes.user_variables(other)
        elif attributes.may_become_others():
            ours |= attributes.user_variables(other)
            become = attributes.become(other, folder)
        else:
            words = attributes.words_by_helper(other, words, helper)
    built = build(env, inherit=inherit_env, scrub=scrub, keep=keep, ours=ours)
    limits = attributes.parse_limits(limits_wanted, is_agents=is_agents)
    if limits_wanted:
        attributes.check_allowed(limits)
    return Launch(
        path=resolve_program(words[0], folder, built),
        argv=words,
        env=built,
        cwd=folder,
        inherited=attributes.take_inherited(),
        limits=limits,
        cgroup=cgroups.order(limits_wanted),
        pass_fds=_passable(pass_fds),
        user=become,
        ender=_ender(helper) if helper else None,
        is_agents=is_agents,
    )


def _ender(helper: Sequence[str]) -> tuple[bytes, ...]:
    """Return the helper and the `kill` that it runs, both by absolute path.

    They are looked up now, by the PATH of this program, because the keeper has no PATH.
    """
    words = argv_words(helper)
    ours = build(None, inherit=True)
    program, kill = (
        os.path.abspath(resolve_program(word, b".", ours)) for word in (words[0], b"kill")
    )
    return program, *words[1:], kill


def _passable(pass_fds: Any) -> tuple[int, ...]:
    try:
        fds: tuple[Any, ...] = tuple(pass_fds)
    except TypeError as exc:
        hint = "pass a list of fd numbers"
        raise UsageError(f"pass_fds cannot be {pass_fds!r}", hint=hint) from exc
    if len(fds) > syscalls.PASSED_FDS_MAX:
        hint = f"pass at most {syscalls.PASSED_FDS_MAX}"
        raise UsageError(f"cannot pass on {len(fds)} fds: they are too many", hint=hint)
    for fd in fds:
        if isinstance(fd, bool) or not isinstance(fd, int) or fd < 3:
            hint = "pass whole numbers from 3 on; use stdin= for fds 0 to 2"
            raise UsageError(f"cannot pass on fd {fd!r}", hint=hint)
        try:
            os.fstat(fd)
        except (OSError, OverflowError) as exc:
            hint = "pass it on before you close it"
            raise UsageError(f"cannot pass on fd {fd}: it is not open", hint=hint) from exc
        if fd >= attributes.child_nofile():
            hint = f"use dup2 to give it a number below {attributes.child_nofile()}"
            message = f"cannot pass on fd {fd}: it exceeds the child's limit of open files"
            raise UsageError(message, hint=hint)
    if len(set(fds)) != len(fds):
        raise UsageError("pass_fds names an fd twice", hint="pass each number once")
    return fds
