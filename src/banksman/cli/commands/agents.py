"""`banksman agents`: list the known agents, what each can do, and which are on this machine.

The verb asks no server and starts no agent: it looks for programs on PATH. Only `--versions` starts
the programs it found, each for a moment, and ends its whole process tree.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO, cast

from banksman.cli import OK
from banksman.cli.arguments import Parser, add_format
from banksman.cli.output import as_line, say, say_json, table
from banksman.cli.server_command import perform
from banksman.errors import BanksmanError
from banksman.runtime.execute import execute
from banksman.sessions import known_agents
from banksman.sessions.known_agents import InstalledAgent
from banksman.sessions.profile import CAPABILITIES

# Node.js with a bundle of 20 MB takes 2 s on a busy machine. A program that needs longer is doing
# something else.
VERSION_SECONDS_MAX = 10.0
VERSION_CHARACTERS_MAX = 60
AT_ONCE_MAX = 4
# These programs start another program and would print their own version instead of the agent's.
_LAUNCHERS = frozenset(
    ("npx", "bunx", "pnpx", "uvx", "pipx", "node", "bun", "deno", "env", "docker", "podman", "sh")
)
# Narrower text would break most lines in the middle of a word.
WIDTH_MIN = 40
_LABEL = 10

_NOTES = """\
To add an agent, write a file NAME.toml in {folder}; docs/agents.md describes
its format. A file with the name of a built-in agent replaces that agent.

exit codes: 0 success, 2 wrong usage, 5 cannot write to stdout.
"""


def parser() -> Parser:
    flags = Parser(
        "agents",
        "[NAME] [--versions]",
        "List the known agents, what each can do, and which are installed.",
        "banksman agents --versions",
        notes=_NOTES.format(
            folder=known_agents.user_folder() or "banksman/agents in the configuration folder"
        ),
    )
    flags.add_argument(
        "name", nargs="?", metavar="NAME", help="show only this agent, with all details"
    )
    flags.add_argument(
        "--versions", action="store_true", help="run each installed agent with --version"
    )
    add_format(flags, json="one object", quiet="names of installed agents")
    return flags


def main(words: list[str]) -> int:
    return perform(_agents, parser().parse_args(words))


def _agents(arguments: argparse.Namespace) -> int:
    found = known_agents.find_agents(arguments.name)
    versions = asyncio.run(_versions(found)) if arguments.versions else {}
    match arguments.format:
        case "json":
            # The format of `GET /v1/agents`, with the version if --versions was given.
            say_json({"agents": [{**each.facts(), **_told(each, versions)} for each in found]})
        case "quiet":
            for each in found:
                if each.path is not None:
                    say(as_line(each.name))
        case _:
            width = _width()
            if arguments.name is not None or width < _matrix_width(found):
                _show_each(found, versions, width)
            else:
                _show_matrix(found, versions, width)
    return OK


def _told(each: InstalledAgent, versions: dict[str, str | None]) -> dict[str, str | None]:
    return {"version": versions[each.name]} if each.name in versions else {}


# -- text output ---------------------------------------------------------------------------------
def _width() -> int:
    """Return the width for text. A pipe has no limit, because a program reads it."""
    stdout = cast("TextIO | None", sys.stdout)
    is_terminal = stdout is not None and stdout.isatty()
    return (
        max(WIDTH_MIN, shutil.get_terminal_size().columns)
        if is_terminal or "COLUMNS" in os.environ
        else 1 << 16
    )


def _columns() -> list[str]:
    return sorted(CAPABILITIES)


def _matrix_width(found: Sequence[InstalledAgent]) -> int:
    return max(len("AGENT"), *(len(each.name) for each in found)) + sum(
        2 + len(name) for name in ("FOUND", *_columns())
    )


def _show_matrix(
    found: Sequence[InstalledAgent], versions: dict[str, str | None], width: int
) -> None:
    rows: list[list[object]] = []
    for each in found:
        can = None if each.profile is None else each.profile.capabilities
        cells = ("?" if can is None else "yes" if name in can else "-" for name in _columns())
        rows.append([each.name, "yes" if each.path else "-", *cells])
    table(("AGENT", "FOUND", *_columns()), rows)
    for each in found:
        lines = list(_account(each, versions, with_capabilities=False))
        if lines:
            say()
            _show(each, lines, width)


def _show_each(
    found: Sequence[InstalledAgent], versions: dict[str, str | None], width: int
) -> None:
    for number, each in enumerate(found):
        if number:
            say()
        _show(each, list(_account(each, versions, with_capabilities=True)), width)


def _show(each: InstalledAgent, lines: list[tuple[str, str]], width: int) -> None:
    title = (
        "" if each.profile is None or each.profile.title == each.name else f"  {each.profile.title}"
    )
    say(as_line(f"{each.name}{title}"))
    for label, text in lines:
        indent = " " * (2 + _LABEL)
        wrapped = textwrap.wrap(
            as_line(text),
            max(width - 1, WIDTH_MIN),
            initial_indent=indent,
            subsequent_indent=indent,
        )
        say(f"  {label:<{_LABEL}}" + "\n".join(wrapped)[len(indent) :])


def _account(
    each: InstalledAgent, versions: dict[str, str | None], *, with_capabilities: bool
) -> Iterator[tuple[str, str]]:
    """Yield the topics of one agent as label and text. A topic without text is left out."""
    if each.source is not None:
        yield "from", f"{each.source}{', replaces the built-in agent' if each.overrides else ''}"
    profile = each.profile
    if profile is None:
        yield "wrong", each.error or ""
        return
    if each.path is not None:
        yield "found", each.path
    elif not profile.command:
        yield "command", "given when a session is opened (banksman open NAME -- PROGRAM …)"
    elif profile.install:
        yield "install", profile.install
    if each.name in versions:
        yield "version", versions[each.name] or "unknown"
    if with_capabilities:
        if profile.command:
            yield "command", " ".join(profile.command)
        yield "can", ", ".join(sorted(profile.capabilities)) or "only answer"
        yield "cannot", ", ".join(sorted(CAPABILITIES - profile.capabilities)) or "-"
    for words in profile.repairs():
        yield "repaired", words
    if with_capabilities:
        if profile.note:
            yield "note", profile.note
        if profile.website:
            yield "website", profile.website


# -- versions ------------------------------------------------------------------------------------
async def _versions(found: Sequence[InstalledAgent]) -> dict[str, str | None]:
    room = asyncio.Semaphore(AT_ONCE_MAX)
    wanted = [each for each in found if each.path is not None]
    told = await asyncio.gather(*(_version(each, room) for each in wanted))
    return {each.name: version for each, version in zip(wanted, told, strict=True)}


async def _version(each: InstalledAgent, room: asyncio.Semaphore) -> str | None:
    """Return the first line of `PROGRAM --version`, or None if the program is only a launcher."""
    profile, path = each.profile, each.path
    assert profile is not None, "an installed agent has a profile"
    assert path is not None, "an installed agent has a path"
    if os.path.basename(profile.command[0]) in _LAUNCHERS:
        return None
    async with room:
        try:
            done = await execute(
                [path, "--version"],
                timeout=VERSION_SECONDS_MAX,
                grace=1.0,
                env=profile.variables,
                # As for a session; a version needs no key of a provider.
                scrub=(*profile.scrub, "banksman"),
                output_bytes_max=4096,
                output_total_max=1 << 20,
            )
        except BanksmanError as exc:
            return as_line(f"cannot run it: {exc}", characters_max=VERSION_CHARACTERS_MAX)
    if done.ended != "exited":
        return f"no answer in {done.seconds:.0f} s"
    lines = [line.strip() for line in done.stdout.text.splitlines() if line.strip()]
    return (
        as_line(lines[0], characters_max=VERSION_CHARACTERS_MAX)
        if done.code == 0 and lines
        else None
    )
