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
from banksman.config.layers import as_toml, put, template

_NOTES = """\
A flag is heard before a variable (BANKSMAN_STORE, BANKSMAN_SERVE_PORT …), a variable before the file, the file before
what is usual. The file: --config, BANKSMAN_CONFIG, or banksman/config.toml in the user's configuration folder. A key in
it that is not known is an error that names the nearest one. Secrets are told as set, and never shown.

exit codes: 0 it went well, 2 wrong usage, or a file that is wrong, 5 stdout could not be written.
"""


def parser() -> Parser:
    flags = Parser(
        "config",
        "show [KEY] | init [--force] | path",
        "show: what is set, and where each value came from. init: write a file with every key in it, commented out.\n"
        "path: say which file is read.",
        "banksman config show serve.port",
        notes=_NOTES,
        is_lenient=True,
    )
    flags.add_argument("action", choices=("show", "init", "path"), metavar="show|init|path", help="what to do")
    flags.add_argument("key", nargs="?", metavar="KEY", help="show: this one only, such as store or serve.port")
    flags.add_argument("--force", action="store_true", help="init: replace the file that is there")
    flags.add_argument("--config", metavar="PATH", help="this file instead of the user's")
    add_format(flags, json="one object", quiet="show: the values alone; init and path: the path")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if arguments.action != "show" and arguments.key is not None:
        flags.error("a KEY is for show")
    if arguments.action != "init" and arguments.force:
        flags.error("--force is for init")
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
            table(("KEY", "VALUE", "FROM"), [(one.key.name, _value(one), one.origin) for one in wanted])
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
        say_aside(as_line(f"banksman: {stray.name} means nothing here; do you mean {stray.nearest}?"))


def _init(arguments: argparse.Namespace) -> int:
    path = config.chosen_path(arguments.config).path
    put(path, template(), replaces=arguments.force)
    _tell_path(arguments, str(path), f"wrote {path}; every key is in it, commented out")
    return OK


def _path(arguments: argparse.Namespace) -> int:
    place = config.chosen_path(arguments.config)
    if arguments.format == "json":
        say_json({"file": str(place.path), "origin": place.origin, "exists": place.path.exists()})
        return OK
    say(as_line(place.path))
    if arguments.format == "text" and not place.path.exists():
        say_aside("banksman: there is none yet; banksman config init makes one")
    return OK


def _tell_path(arguments: argparse.Namespace, path: str, words: str) -> None:
    match arguments.format:
        case "json":
            say_json({"file": path})
        case "quiet":
            say(as_line(path))
        case _:
            say(as_line(words))
