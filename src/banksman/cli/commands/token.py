"""`banksman token`: create, list and revoke the named tokens of this user's servers.

It works on the file of tokens and needs no server. Running servers read the file when it changes.
"""

from __future__ import annotations

import argparse
import re
import time

from banksman.cli import OK
from banksman.cli.arguments import Parser, add_format
from banksman.cli.output import as_line, say, say_json, table
from banksman.cli.server_command import perform
from banksman.cli.tui.screen import seconds_in_words
from banksman.errors import UsageError
from banksman.server.access import named_tokens
from banksman.server.access.named_tokens import NamedToken
from banksman.server.access.roles import Role

_DESCRIPTION = """\
Create, list and revoke named tokens for the clients of `banksman serve`. A token has a role, and
may be limited to sessions and agents. `create` prints the token once: only its hash is stored.
Servers of this user accept a new token, and refuse a revoked one, at once."""
_NOTES = """\
roles: viewer (reads), asker (asks, in its own sessions and in those shared with it), approver
(answers questions), operator (everything but tokens), admin (everything).

exit codes: 0 success, 2 wrong usage, 5 cannot write to stdout, 130 Ctrl-C.
"""
_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}
_LIFETIME = re.compile(r"([1-9][0-9]{0,5})([mhd])")


def parser() -> Parser:
    flags = Parser(
        "token",
        "create --name NAME --role ROLE [flags] | list | revoke --name NAME",
        _DESCRIPTION,
        "banksman token create --name alice --role asker --sessions 'alice-*' --expires 30d",
        notes=_NOTES,
    )
    flags.add_argument("action", choices=("create", "list", "revoke"), help="what to do")
    flags.add_argument("--name", metavar="NAME", help="name of the person or program")
    flags.add_argument("--role", choices=tuple(Role), help="what the token allows")
    flags.add_argument(
        "--sessions",
        metavar="PATTERNS",
        type=_words,
        default=(),
        help="only sessions with these names, separated by commas; * stands for any text",
    )
    flags.add_argument(
        "--agents",
        metavar="AGENTS",
        type=_words,
        default=(),
        help="only sessions with these agents, separated by commas",
    )
    flags.add_argument(
        "--expires",
        metavar="TIME",
        type=_lifetime,
        help="how long the token is valid, such as 12h or 30d (default: until it is revoked)",
    )
    add_format(flags, json="print JSON", quiet="print only names")
    return flags


def main(words: list[str]) -> int:
    return perform(_token, parser().read(words))


def _token(arguments: argparse.Namespace) -> int:
    path = named_tokens.default_path()
    if arguments.action == "list":
        return _list(arguments, named_tokens.read(path))
    if arguments.name is None:
        raise UsageError("cannot tell which token is meant", hint="pass --name NAME")
    if arguments.action == "revoke":
        named_tokens.revoke(path, arguments.name)
        return OK
    if arguments.role is None:
        raise UsageError("cannot create a token without a role", hint="pass --role ROLE")
    token = named_tokens.create(
        path,
        arguments.name,
        Role(arguments.role),
        sessions=arguments.sessions,
        agents=arguments.agents,
        seconds=arguments.expires,
    )
    if arguments.format == "json":
        say_json({"name": arguments.name, "token": token})
    else:
        say(token)
    return OK


def _list(arguments: argparse.Namespace, tokens: tuple[NamedToken, ...]) -> int:
    match arguments.format:
        case "json":
            say_json({"tokens": [_shown(token) for token in tokens]})
        case "quiet":
            for token in tokens:
                say(token.name)
        case _ if not tokens:
            say("no named tokens; run `banksman token create`")
        case _:
            table(
                ("NAME", "ROLE", "SESSIONS", "AGENTS", "EXPIRES"), [_row(each) for each in tokens]
            )
    return OK


def _shown(token: NamedToken) -> dict[str, object]:
    names = ("name", "role", "sessions", "agents", "created", "expires")
    return {name: getattr(token, name) for name in names}


def _row(token: NamedToken) -> tuple[object, ...]:
    left = None if token.expires is None else token.expires - time.time()
    return (
        token.name,
        str(token.role),
        as_line(" ".join(token.sessions) or "all"),
        as_line(" ".join(token.agents) or "all"),
        "never" if left is None else f"in {seconds_in_words(left)}" if left > 0 else "expired",
    )


def _words(text: str) -> tuple[str, ...]:
    """Split a list of limits. An empty one is a mistake: without a limit, all is allowed."""
    words = tuple(text.split(","))
    if not all(word.strip() for word in words):
        raise argparse.ArgumentTypeError(f"empty entry in {text!r:.40}: leave the flag out for all")
    return words


def _lifetime(text: str) -> float:
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r:.40}: use 90m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]
