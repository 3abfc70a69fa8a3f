"""Flags and settings of the verbs that run a server: `serve` and `host`.

This module imports no client of a server: agents wait for the next server while it starts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from banksman.cli.arguments import Parser
from banksman.cli.output import as_line, say_aside
from banksman.errors import UsageError

if TYPE_CHECKING:
    from banksman.server.server_settings import ServerSettings


def add_running(flags: Parser, *, room: str) -> None:
    """Add the flags that `serve` and `host` share.

    `room`: the help for --room. No flag has a default: None means "not given", so that the settings
    file applies.
    """
    add = flags.add_argument
    add("--name", metavar="NAME", help="name of this host (default: the name of the machine)")
    add(
        "--label",
        action="append",
        dest="labels",
        metavar="LABEL",
        help="property that sessions may require, such as gpu; may be repeated",
    )
    add(
        "--budget",
        metavar="BUDGET",
        help="what all sessions may use in a day (UTC), such as tokens=5000000,turns=500",
    )
    add(
        "--caller-budget",
        action="append",
        dest="caller_budgets",
        metavar="CALLER:BUDGET",
        help="the same for a caller, or for * as any caller; may be repeated",
    )
    add("--room", type=int, metavar="N", help=room)
    add("--config", metavar="PATH", help="TOML file to read instead of the user's")
    add("--log-format", choices=("text", "json"), help="format of log lines (default: text)")
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="lowest level to log (default: info)",
    )


def settings_of(
    flags: Parser,
    words: list[str],
    *,
    who: str,
    extra: str,
    check: Callable[[ServerSettings], ServerSettings] | None = None,
) -> ServerSettings | None:
    """Parse the flags and load the server settings. Return None after printing why it cannot start.

    `who` and `extra`: the program and its pip extra, for the message about a missing package.
    `check`: may reject the settings (`UsageError`) or fill in defaults.
    """
    arguments = vars(flags.parse_args(words))
    path: str | None = arguments.pop("config")
    is_collecting = gc.isenabled()
    # Modules are no garbage: a collection during their import finds nothing.
    gc.disable()
    try:
        # It looks for the packages that the server needs. The error names the first missing one.
        import_module("banksman.server.main")
        from banksman.server.server_settings import load  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        reason = f"the package {exc.name} is not installed (pip install 'banksman[{extra}]')"
        say_aside(f"banksman: cannot start {who}: {reason}")
        return None
    finally:
        if is_collecting:
            gc.enable()
    try:
        settings = load(path, arguments)
        return settings if check is None else check(settings)
    except UsageError as exc:
        say_aside(f"banksman: {as_line(exc)}")
        return None
