"""`banksman config`: show the settings and their origin, or write a settings file.

Needs no server.
"""

from __future__ import annotations

import argparse

from banksman import config
from banksman.cli import OK
from banksman.cli.arguments import Parser, add_format
from banksman.cli.output import as_line, say, say_aside, say_json, table
from banksman.cli.server_command import perform
from banksman.config.config_file import as_toml, put, template

_NOTES = """\
Precedence: flag, environment variable (BANKSMAN_STORE, BANKSMAN_SERVE_PORT …), file, default. The
file is --config, BANKSMAN_CONFIG, or banksman/config.toml in the user's configuration folder. An
unknown key in the file is an error that names the nearest key. Secrets are shown as "set", never by
their value.

exit codes: 0 success, 2 wrong usage or an invalid file, 5 cannot write to stdout.
"""


_DESCRIPTION = """\
show: print the settings and the origin of each value. init: write a settings file with every
key, commented out. path: print the path of the settings file."""


def parser() -> Parser:
    flags = Parser(
        "config",
        "show [KEY] | init [--force] | path",
        _DESCRIPTION,
        "banksman config show serve.port",
        notes=_NOTES,
        is_lenient=True,
    )
    flags.add_argument(
        "action", choices=("show", "init", "path"), metavar="show|init|path", help="the action"
    )
    flags.add_argument(
        "key", nargs="?", metavar="KEY", help="show: only this key, such as store or serve.port"
    )
    flags.add_argument("--force", action="store_true", help="init: replace an existing file")
    flags.add_argument("--config", metavar="PATH", help="TOML file to use instead of the user's")
    add_format(flags, json="one object", quiet="show: only values; init and path: the path")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if arguments.action != "show" and arguments.key is not None:
        flags.error(f"cannot use KEY with {arguments.action}: it is only for show")
    if arguments.action != "init" and arguments.force:
        flags.error(f"cannot use --force with {arguments.action}: it is only for init")
    actions = {"show": _show, "init": _init, "path": _path}
    return perform(actions[arguments.action], arguments)


def _show(arguments: argparse.Namespace) -> int:
    if arguments.key is not None:
        config.known(arguments.key)
    found = config.load(path=arguments.config)
    wanted = [one for one in found if arguments.key in (None, one.key.name)]
    match arguments.format:
        case "json":
            told = {one.key.name: {"value": one.shown, "origin": one.origin} for one in wanted}
            strays = [{"name": stray.name, "nearest": stray.nearest} for stray in config.strays()]
            say_json({"file": str(found.place.path), "settings": told, "unknown_variables": strays})
        case "quiet":
            for one in wanted:
                say(as_line(_plain(one)))
        case _:
            table(
                ("KEY", "VALUE", "FROM"),
                [(one.key.name, _value(one), one.origin) for one in wanted],
            )
            _mention_strays()
    return OK


def _value(one: config.Setting) -> str:
    if one.value is None:
        return f"({one.key.usual})"
    return one.shown if one.key.is_secret and one.value else as_toml(one.shown)


def _plain(one: config.Setting) -> str:
    """Format a value for a script: text unchanged, other types as TOML, empty if it is not set."""
    if one.value is None:
        return ""
    return one.shown if isinstance(one.shown, str) else as_toml(one.shown)


def _mention_strays() -> None:
    for stray in config.strays():
        say_aside(as_line(f"banksman: unknown variable {stray.name}; {stray.hint}"))


def _init(arguments: argparse.Namespace) -> int:
    path = config.chosen_path(arguments.config).path
    put(path, template(), replaces=arguments.force)
    _tell_path(arguments, str(path), f"wrote {path} with every key, commented out")
    return OK


def _path(arguments: argparse.Namespace) -> int:
    place = config.chosen_path(arguments.config)
    if arguments.format == "json":
        say_json({"file": str(place.path), "origin": place.origin, "exists": place.path.exists()})
        return OK
    say(as_line(place.path))
    if arguments.format == "text" and not place.path.exists():
        say_aside("banksman: the file does not exist yet; run `banksman config init` to write it")
    return OK


def _tell_path(arguments: argparse.Namespace, path: str, words: str) -> None:
    match arguments.format:
        case "json":
            say_json({"file": path})
        case "quiet":
            say(as_line(path))
        case _:
            say(as_line(words))
