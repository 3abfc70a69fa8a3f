"""`banksman log`: what was said in a session, from any place on, and as it comes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from banksman.cli.client import Client, segment
from banksman.cli.stream import Event, Follower
from banksman.cli.terminal import as_line, say, say_json
from banksman.cli.verb import OK, Parser, client_of, perform
from banksman.cli.wording import line_of

# As many as the server gives at once.
PAGE_EVENTS_MAX = 1000


def log(words: list[str]) -> int:
    parser = Parser(
        "log",
        "SESSION [--follow] [--raw] [--after CURSOR] [-n LIMIT]",
        "Print the events of a session. With --follow, go on until Ctrl-C; a server that is started anew in between\n"
        "is waited for, and nothing is told twice or left out.",
        "banksman log fix-ci --follow --json | jq .kind",
        streams=True,
    )
    parser.add_argument("session", metavar="SESSION", help="its id or its name")
    parser.add_argument("-f", "--follow", action="store_true", help="also what is still to come")
    parser.add_argument("--raw", action="store_true", help="with the agent's own lines")
    parser.add_argument("--after", metavar="CURSOR", help="begin after this one (else with the first)")
    parser.add_argument("-n", "--limit", type=int, metavar="LIMIT", help="stop after so many events")
    arguments = parser.read(words)
    if arguments.limit is not None and arguments.limit < 1:
        parser.error("--limit is at least 1")
    return perform(_log, arguments)


def _log(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    # By its id from here on: a name may be given to another session while we are away.
    session: str = client.get(f"/v1/sessions/{segment(arguments.session)}")["id"]
    if arguments.follow:
        events = Follower(client, session, after=arguments.after, raw=arguments.raw).events()
    else:
        events = _pages(client, session, arguments)
    for event in itertools.islice(events, arguments.limit):
        _show(event, arguments)
    return OK


def _pages(client: Client, session: str, arguments: argparse.Namespace) -> Iterator[Event]:
    """Until the end as it was when it was reached. A gap is told as a stream tells it."""
    after: str | None = arguments.after
    path = f"/v1/sessions/{segment(session)}/events"
    size = min(arguments.limit or PAGE_EVENTS_MAX, PAGE_EVENTS_MAX)
    while True:
        page = client.get(path, {"after": after, "limit": size, "raw": 1 if arguments.raw else None})
        if page.get("gap"):
            yield {"kind": "stream.gap", "session": session, **page["gap"]}
        yield from page["events"]
        after = page["next"]
        if not page["events"] or after is None:
            return


def _show(event: Event, arguments: argparse.Namespace) -> None:
    match arguments.format:
        case "json":
            say_json(event)
        case "quiet":
            if "cursor" in event:
                say(as_line(event["cursor"]))
        case _:
            line = line_of(event)
            frame = event.get("frame")
            if frame is not None:
                sign = "<" if event["kind"] == "update" else ">"
                say(f"{as_line(event['cursor']):>8}  {sign} {as_line(frame)}")
            elif line is not None:
                say(line)
