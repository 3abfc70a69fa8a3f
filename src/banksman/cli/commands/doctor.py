"""`banksman doctor`: check this machine and say how to fix each problem.

This module has the flags and the output. The checks are in `cli/doctor/`. They change nothing: they
create no file, and start no agent and no server. They run and end one command, as a proof that
commands work. Only `--sweep` ends the processes and removes the files that dead hosts have left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

from banksman.cli import NOT_DONE, OK
from banksman.cli.arguments import Parser, add_format
from banksman.cli.doctor import DoctorOptions, Finding, FindingVerdict, made, wrong
from banksman.cli.output import as_line, say, say_json, size_of, stdout_style, wrapped
from banksman.cli.server_command import perform

GROUPS = {
    "machine": "this machine",
    "settings": "settings",
    "places": "files",
    "stores": "sessions",
    "reach": "server and agents",
    "leftovers": "leftovers of dead hosts",
}

_INDENT = 9

_NOTES = """\
Each line is ok, a note (worth knowing), or wrong, followed by how to fix it. --sweep ends the
processes and removes the sockets and files that dead hosts have left, and lists each. It touches
only what certainly belongs to Banksman and is certainly not in use.

For a store on NATS, doctor checks each server that the URL names, the streams and their replicas,
and when the servers sync acknowledged data to disk. The servers report the last only on their
monitoring port (http: in the configuration of nats-server): port 8222 of each server, or the URL of
--monitor.

exit codes: 0 nothing is wrong, 1 something is wrong, 2 wrong usage, 5 cannot write to stdout.
"""


_DESCRIPTION = """\
Check the kernel, the limits, the settings, the permissions, the store, the server and the
leftovers of dead hosts, and say how to fix each problem."""


def parser() -> Parser:
    flags = Parser(
        "doctor",
        "[--sweep] [--store STORE] [--monitor URL]",
        _DESCRIPTION,
        "banksman doctor --sweep",
        notes=_NOTES,
        is_lenient=True,
    )
    flags.add_argument(
        "--sweep",
        action="store_true",
        help="first end the processes and remove the files of dead hosts",
    )
    flags.add_argument(
        "--store", metavar="STORE", help="check only this store, not the stores in the settings"
    )
    flags.add_argument(
        "--monitor",
        metavar="URL",
        action="append",
        default=[],
        help="URL of the monitoring port of a NATS server; may be repeated",
    )
    add_format(flags, json="one object", quiet="only what is wrong")
    return flags


def main(words: list[str]) -> int:
    return perform(_doctor, parser().read(words))


def _doctor(arguments: argparse.Namespace) -> int:
    which = DoctorOptions(arguments.store, tuple(arguments.monitor))
    swept: list[tuple[bool, str]] = []
    if arguments.sweep:
        from banksman.cli.doctor import leftovers  # noqa: PLC0415

        for is_done, what in leftovers.sweep(which.store):
            swept.append((is_done, what))
            if arguments.format == "text":
                say(as_line(what if is_done else f"cannot sweep: {what}"))
        if arguments.format == "text":
            say("" if swept else "nothing to sweep\n")
    found: dict[str, list[Finding]] = {}
    for group, title in GROUPS.items():
        found[group] = []
        if arguments.format == "text":
            say(stdout_style().bold(title))
        for finding in _findings(group, which):
            found[group].append(finding)
            if arguments.format != "json":
                _show(finding, is_quiet=arguments.format == "quiet")
    count = sum(one.verdict is FindingVerdict.WRONG for group in found.values() for one in group)
    is_well = not count and all(is_done for is_done, _ in swept)
    match arguments.format:
        case "json":
            _say_json(found, swept, is_well=is_well)
        case "quiet":
            pass
        case _:
            some = "one thing is wrong" if count == 1 else f"{count} things are wrong"
            say(f"\n{some if count else 'nothing is wrong'}")
    return OK if is_well else NOT_DONE


def _findings(group: str, which: DoctorOptions) -> Iterator[Finding]:
    try:
        checks = import_module(f"banksman.cli.doctor.{group}").checks(which)
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        yield wrong(
            GROUPS[group],
            f"the package {exc.name} is not installed",
            "pip install 'banksman[server]'",
        )
        return
    for check in checks:
        yield from made(check)


def _show(finding: Finding, *, is_quiet: bool) -> None:
    if is_quiet:
        if finding.verdict is FindingVerdict.WRONG:
            say(as_line(f"{finding.name}: {finding.seen}"))
        return
    style = stdout_style()
    colour = {
        FindingVerdict.OK: style.green,
        FindingVerdict.NOTE: style.yellow,
        FindingVerdict.WRONG: style.red,
    }[finding.verdict]
    first, *rest = _fitted(as_line(f"{finding.name}: {finding.seen}"))
    word = finding.verdict.value
    say(f"  {colour(word)}{' ' * (_INDENT - 2 - len(word))}{first}")
    for line in (*rest, *(_fitted(as_line(finding.fix)) if finding.fix else ())):
        say(f"{' ' * _INDENT}{line}")


def _fitted(text: str) -> list[str]:
    """Wrap text for a terminal. A pipe gets it as one line."""
    if not stdout_style().is_terminal:
        return [text]
    return wrapped(text, max(size_of(sys.stdout)[0], 2 * _INDENT) - _INDENT)


def _say_json(
    found: dict[str, list[Finding]], swept: list[tuple[bool, str]], *, is_well: bool
) -> None:
    say_json(
        {
            "well": is_well,
            "checks": [
                {
                    "group": group,
                    "name": one.name,
                    "verdict": one.verdict.value,
                    "seen": one.seen,
                    "fix": one.fix or None,
                }
                for group, findings in found.items()
                for one in findings
            ],
            "swept": [{"done": is_done, "what": what} for is_done, what in swept],
        }
    )
