"""Flags that say what the agent of a new session may use: `open`, `run` and `ask --open`."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from banksman.cli.arguments import Parser
from banksman.errors import UsageError


def add_containment(parser: Parser) -> None:
    """Add --user, --limit, --scrub, --wrap, --sandbox, --on-open and --on-close."""
    group = parser.add_argument_group(
        "containment of the agent",
        "A server must allow these flags: see callers_choose in its settings.",
    )
    group.add_argument("--user", metavar="USER", help="run the agent as another user")
    group.add_argument(
        "--limit",
        action="append",
        metavar="NAME=N",
        help="limit each process of the agent (nofile, as, nproc, nice …) or its whole tree "
        "(memory_bytes, processes, cpus); may be repeated",
    )
    group.add_argument(
        "--scrub",
        metavar="NAMES",
        help="variables that the agent does not get, separated by commas: secrets, nesting, "
        "or names (default: as its profile says)",
    )
    wrap = group.add_mutually_exclusive_group()
    wrap.add_argument(
        "--wrap",
        metavar="WORDS",
        help="prefix of the agent's command, with {cwd}, {session} and {command}",
    )
    wrap.add_argument(
        "--sandbox", metavar="NAME", help="known prefix: bwrap, unshare, ssh:HOST or docker:BOX"
    )
    group.add_argument(
        "--on-open",
        metavar="WORDS",
        help="command that makes what the session works in, with {cwd} and {session}; "
        "if it fails, the session is not opened",
    )
    group.add_argument(
        "--on-close", metavar="WORDS", help="command that removes it, after the session is closed"
    )


def containment_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the members of a request body that the flags set."""
    found = {
        "user": getattr(arguments, "user", None),
        "limits": _limits(getattr(arguments, "limit", None)),
        "scrub": _names(getattr(arguments, "scrub", None)),
        "wrap": _wrap(arguments),
        "on_open": _words("--on-open", getattr(arguments, "on_open", None)),
        "on_close": _words("--on-close", getattr(arguments, "on_close", None)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _limits(pairs: list[str] | None) -> dict[str, float] | None:
    if pairs is None:
        return None
    # Imported here, because most calls have no limits.
    from banksman.sessions.containment import parse_limits  # noqa: PLC0415

    return parse_limits(pairs, "--limit")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _wrap(arguments: argparse.Namespace) -> str | list[str] | None:
    text: str | None = getattr(arguments, "wrap", None)
    return getattr(arguments, "sandbox", None) if text is None else _words("--wrap", text)


def _words(flag: str, text: str | None) -> list[str] | None:
    try:
        return None if text is None else shlex.split(text)
    except ValueError as exc:
        hint = "quote the words as in a shell"
        raise UsageError(f"{flag} cannot be {text!r:.60}: {exc}", hint=hint) from exc
