"""`banksman log`: print the events of a session from any cursor, and follow new ones."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator

from banksman.cli import OK
from banksman.cli.audit import audit_line, audit_of
from banksman.cli.client.client import Client, segment
from banksman.cli.client.event_stream import Event, EventFollower
from banksman.cli.client.exchange import ClientError
from banksman.cli.output import (
    as_line,
    as_text,
    say,
    say_aside,
    say_json,
    size_of,
    stderr_style,
    stdout_style,
    wrapped,
)
from banksman.cli.server_command import ServerParser, client_of, perform

# The largest page that the server returns.
PAGE_EVENTS_MAX = 1000
# Width of the cursor, the time and the spaces around them.
INDENT = 20
# Maximum length of a line for people. --json and --raw print everything.
SUMMARY_CHARACTERS_MAX = 500
# Members of Banksman's events that are too long for a line.
_LONG = (
    "born",
    "ref",
    "usage",
    "details",
    "command",
    "args",
    "env",
    "options",
    "rules",
    "system_prompt",
    "schema",
)


_DESCRIPTION = """\
Print the events of a session. With --follow, also print new events, until Ctrl-C. If the server
restarts, log waits for it, and no event is lost or printed twice."""


def parser() -> ServerParser:
    flags = ServerParser(
        "log",
        "SESSION [--follow] [--raw | --audit] [--after CURSOR] [-n LIMIT] | SESSION --stderr",
        _DESCRIPTION,
        "banksman log fix-ci --follow --json | jq .kind",
        streams=True,
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("-f", "--follow", action="store_true", help="also print new events")
    flags.add_argument("--raw", action="store_true", help="include the raw lines of the agent")
    flags.add_argument(
        "--audit",
        action="store_true",
        help="print only who did what: opened, set, asked, edited, moved, interrupted, "
        "preempted, answered, shared, closed",
    )
    flags.add_argument(
        "--stderr",
        action="store_true",
        help="print what the running agent has written to stderr, and no events",
    )
    flags.add_argument(
        "--after", metavar="CURSOR", help="start after this cursor (default: at the first event)"
    )
    flags.add_argument(
        "-n", "--limit", type=int, metavar="LIMIT", help="stop after this number of events"
    )
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if arguments.limit is not None and arguments.limit < 1:
        flags.error("--limit must be at least 1")
    if arguments.raw and arguments.audit:
        flags.error("--audit prints no lines of the agent: leave out --raw")
    if arguments.stderr and (
        arguments.follow or arguments.raw or arguments.audit or arguments.after or arguments.limit
    ):
        flags.error("--stderr prints no events: leave out the other flags")
    return perform(_log, arguments)


def _log(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    if arguments.stderr:
        found = client.get(f"/v1/sessions/{segment(arguments.session)}/stderr")
        if arguments.format == "json":
            say_json(found)
        elif found["text"]:
            say(as_text(found["text"].rstrip("\n")))
        return OK
    # From here on the session is addressed by its id. Its name may be given to another session
    # while the connection is down.
    session: str = client.get(f"/v1/sessions/{segment(arguments.session)}")["id"]
    if arguments.follow:
        follower = EventFollower(
            client,
            session,
            after=arguments.after,
            raw=arguments.raw,
            on_lost=_tell_lost,
            on_back=_tell_back,
        )
        events = follower.events()
    else:
        events = _pages(client, session, arguments)
    if arguments.audit:
        _show_audit(events, arguments)
        return OK
    for event in itertools.islice(events, arguments.limit):
        _show(event, arguments)
    return OK


def _show_audit(events: Iterator[Event], arguments: argparse.Namespace) -> None:
    """Print the actions of callers. Events that retention has removed are reported as a gap."""
    found = (
        (event, entry)
        for event in events
        if (entry := audit_of(event)) is not None or event["kind"] == "stream.gap"
    )
    for event, entry in itertools.islice(found, arguments.limit):
        if entry is None:
            _show(event, arguments)
        elif arguments.format == "json":
            say_json(entry._asdict())
        else:
            say(as_line(entry.cursor) if arguments.format == "quiet" else audit_line(entry))


def _tell_lost(error: ClientError) -> None:
    """Report a lost connection to a person at the terminal.

    A pipe gets no message, because no event is lost.
    """
    if stderr_style().is_terminal:
        say_aside(f"banksman: {as_line(error.args[0])}; reconnecting, no event is lost")


def _tell_back() -> None:
    if stderr_style().is_terminal:
        say_aside("banksman: connected again")


def _pages(client: Client, session: str, arguments: argparse.Namespace) -> Iterator[Event]:
    """Yield events page by page, until the log is read to its end.

    A gap is reported as in a stream.
    """
    after: str | None = arguments.after
    path = f"/v1/sessions/{segment(session)}/events"
    # The limit of an audit counts actions, which are few of the events.
    limit = None if arguments.audit else arguments.limit
    size = min(limit or PAGE_EVENTS_MAX, PAGE_EVENTS_MAX)
    while True:
        query = {"after": after, "limit": size, "raw": 1 if arguments.raw else None}
        page = client.get(path, {**query, "frames": "false" if arguments.audit else None})
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
            frame = event.get("frame")
            if frame is not None:
                sign = "<" if event["kind"] == "update" else ">"
                say(f"{as_line(event['cursor']):>8}  {sign} {as_line(frame)}")
            elif (line := line_of(event)) is not None:
                _say_line(line)


def _say_line(line: str) -> None:
    """Print a line. On a terminal, wrapped rows are indented so that the cursors form a column."""
    style = stdout_style()
    if not style.is_terminal:
        say(line)
        return
    first, *rest = wrapped(line[INDENT:], max(size_of(sys.stdout)[0], INDENT * 2) - INDENT)
    say("\n".join([style.dim(line[:INDENT]) + first, *(" " * INDENT + more for more in rest)]))


def line_of(event: Event) -> str | None:
    """Describe an event in one line. Return None for a frame that only its dialect understands."""
    kind = event["kind"]
    if kind == "stream.gap":
        return f"{'':>8}  {'':8}  events {event['first']} to {event['last']} are no longer kept"
    said = " | ".join(summary for update in _updates(event) if (summary := _update(update)))
    if kind in ("update", "sent"):
        if not said:
            return None
    else:
        said = _own(event["body"])
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    place = f"{as_line(event['cursor']):>8}  {at}  {as_line(kind)}"
    turn = f" {as_line(event['turn'])}" if event["turn"] else ""
    return f"{place}{turn}  {as_line(said, characters_max=SUMMARY_CHARACTERS_MAX)}".rstrip()


def _updates(event: Event) -> list[Event]:
    return event["body"].get("updates", []) if event["kind"] == "update" else []


def _content(update: Event) -> str:
    content = update.get("content")
    # Only the text kind of ACP content has words.
    return str(content.get("text", "")) if isinstance(content, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _update(update: Event) -> str:
    match update.get("sessionUpdate"):
        case "agent_message_chunk":
            return f"says {_content(update)}"
        case "agent_thought_chunk":
            return f"thinks {_content(update)}"
        case "tool_call":
            return f"calls {update.get('title')}"
        case "tool_call_update":
            return f"tool {update.get('status')}"
        case "usage_update":
            return ""
        case kind:
            return str(kind)


def _own(body: Event) -> str:
    shown = {
        name: value
        for name, value in body.items()
        if name not in _LONG and value not in (None, [], {}, "")
    }
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in shown.items()
    )
