"""What `serve` and `host` have in common: the flags of a process that stays, and its settings before it begins."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from banksman.cli.arguments import Parser
from banksman.cli.output.terminal import as_line, say_aside
from banksman.errors import UsageError

if TYPE_CHECKING:
    from banksman.server.server_settings import ServerSettings


def add_running(flags: Parser, *, room: str) -> None:
    """`room`: what it means for this one. None is "not given", so that the file is heard: no flag has a default."""
    add = flags.add_argument
    add("--name", metavar="NAME", help="what it is called (the name of the machine)")
    add("--label", action="append", dest="labels", metavar="LABEL", help="what sessions may need of it")
    add("--room", type=int, metavar="N", help=room)
    add("--config", metavar="PATH", help="the TOML file to read instead of the user's")
    add("--log-format", choices=("text", "json"), help="how log lines are written (text)")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="what is worth one (info)")


def settings_of(
    flags: Parser,
    words: list[str],
    *,
    who: str,
    extra: str,
    check: Callable[[ServerSettings], ServerSettings] | None = None,
) -> ServerSettings | None:
    """None: it cannot begin, and was told why. `check` may refuse (`UsageError`), or put in what is usual here."""
    arguments = vars(flags.parse_args(words))
    path: str | None = arguments.pop("config")
    try:
        # With all that it needs: the first package that is not there is named.
        import_module("banksman.server.main")
        from banksman.server.server_settings import load  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        say_aside(f"banksman: {who} needs {exc.name}, which is not installed (pip install 'banksman[{extra}]')")
        return None
    try:
        settings = load(path, arguments)
        return settings if check is None else check(settings)
    except UsageError as exc:
        say_aside(f"banksman: {as_line(exc)}")
        return None
