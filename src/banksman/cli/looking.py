"""`banksman ps` and `banksman why`: what there is, and what it waits for. Looking changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from banksman.cli.client import Client, Problem, segment
from banksman.cli.terminal import as_line, as_text, say, say_json, table
from banksman.cli.verb import OK, Parser, client_of, perform
from banksman.cli.wording import QUESTION_CHARACTERS_MAX, how_to_answer, question_of

Shown = dict[str, Any]

COMMAND_CHARACTERS_MAX = 60


def ps(words: list[str]) -> int:
    parser = Parser("ps", "[--all]", "List the sessions, and the commands that run.", "banksman ps --json")
    parser.add_argument("-a", "--all", action="store_true", help="also the commands that have ended")
    return perform(_ps, parser.read(words))


def why(words: list[str]) -> int:
    parser = Parser(
        "why",
        "[SESSION] [--stacks]",
        "Say what a session is doing, who has it, who waits, and which clock ends it.",
        "banksman why fix-ci",
    )
    parser.add_argument("session", nargs="?", metavar="SESSION", help="its id or its name")
    parser.add_argument("--stacks", action="store_true", help="where every task and thread of the server stands")
    arguments = parser.read(words)
    if arguments.session is None and not arguments.stacks:
        parser.error("which session? (or --stacks, for the server itself)")
    return perform(_why, arguments)


def sessions(client: Client) -> Iterator[Shown]:
    """All of them, oldest first, page by page."""
    after: str | None = None
    while True:
        page = client.get("/v1/sessions", {"after": after})
        yield from page["sessions"]
        after = page["next"]
        if after is None:
            return


def _ps(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    # All of them, always: a session is never over, since one that was closed wakes when it is asked something.
    shown = list(sessions(client))
    commands: list[Shown] = client.get("/v1/commands")["commands"]
    commands = [each for each in commands if arguments.all or each["finished"] is None]
    match arguments.format:
        case "json":
            say_json({"sessions": shown, "commands": commands})
        case "quiet":
            for each in (*shown, *commands):
                say(as_line(each["id"]))
        case _:
            _show_all(shown, commands)
    return OK


def _show_all(shown: list[Shown], commands: list[Shown]) -> None:
    if shown:
        head = ("SESSION", "NAME", "AGENT", "PHASE", "HOLDER", "QUEUE", "QUESTIONS", "COST")
        table(head, [_row(each) for each in shown])
    if commands:
        if shown:
            say()
        head = ("COMMAND", "STATE", "PID", "ARGV")
        table(head, [(each["id"], _state(each), each["pid"], _argv(each["argv"])) for each in commands])
    if not shown and not commands:
        say("nothing runs here; banksman open AGENT opens a session")


def _row(session: Shown) -> tuple[object, ...]:
    return (
        session["id"],
        session["name"],
        session["agent"],
        session["phase"],
        session["holder"],
        len(session["queue"]),
        len(session["questions"]),
        money(session["cost"]),
    )


def _state(command: Shown) -> str:
    finished = command["finished"]
    if finished is None:
        return str(command["state"])
    if finished["signal"] is not None:
        return f"{finished['ended']}, signal {finished['signal']}"
    return f"{finished['ended']}, code {finished['code']}"


def _argv(argv: list[str]) -> str:
    return as_line(" ".join(argv), characters_max=COMMAND_CHARACTERS_MAX)


def money(cost: float | None) -> str | None:
    return None if cost is None else f"${cost:.4f}"


def _why(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    found: Shown = {}
    if arguments.session is not None:
        found = client.get(f"/v1/sessions/{segment(arguments.session)}/why")
    stacks: Shown | None = client.get("/v1/stacks") if arguments.stacks else None
    match arguments.format:
        case "json":
            say_json(found if stacks is None else {**found, "stacks": stacks})
        case "quiet":
            if found:
                say(as_line(found["phase"]))
        case _:
            for name, lines in _account(found, _questions(client, found)) if found else ():
                for number, line in enumerate(lines):
                    say(f"{'' if number else name:<10}{as_line(line)}")
            if stacks is not None:
                _show_stacks(stacks)
    return OK


def _account(found: Shown, questions: list[str]) -> Iterator[tuple[str, list[str]]]:
    """What there is to say, by topic; a topic with nothing to say is left out."""
    name = f" ({found['name']})" if found["name"] else ""
    yield "session", [f"{found['id']}{name}, {found['agent']}"]
    place = ", waits for a place among the processes" if found["waits_for_place"] else ""
    yield "phase", [f"{found['phase']}{place}"]
    if found["owner"] is not None:
        yield "owner", [f"process {found['owner']['pid']} at {found['owner']['address'] or 'this machine'}"]
    yield "holder", [found["holder"] or (f"hold {found['hold']}" if found["hold"] else "nobody")]
    yield "queue", [_waiting(each) for each in found["queue"]] or ["empty"]
    yield "questions", questions
    yield "clocks", [_clock(each) for each in found["clocks"]]
    yield "timers", [f"{name}: in {seconds:.1f} s" for name, seconds in found["timers"].items()]
    yield "frames", [_frames(found)]
    cost = money(found["cost"])
    yield "cost", [] if cost is None else [cost]
    yield "tree", list(_tree(found["tree"]))


def _questions(client: Client, found: Shown) -> list[str]:
    """What is asked, and under each the command that answers it."""
    if not found["questions"]:
        return []
    try:
        asked: list[Shown] = client.get(f"/v1/sessions/{segment(found['id'])}/questions")["questions"]
    except Problem:
        # Of a session that another has, or that sleeps, only the log knows them, and nobody could answer them here.
        asked = []
    known = {each["id"]: each for each in asked}
    lines: list[str] = []
    for id in found["questions"]:
        if id in known:
            lines.append(as_line(f"{id}: {question_of(known[id])}", characters_max=QUESTION_CHARACTERS_MAX))
            lines.append(f"  {how_to_answer(found['name'] or found['id'], id)}")
        else:
            lines.append(f"{id} waits for an answer")
    return lines


def _waiting(each: Shown) -> str:
    again = "" if each["attempt"] == 1 else f", attempt {each['attempt']}"
    return f"{each['turn']}, priority {each['priority']}, for {each['seconds']:.1f} s{again}"


def _clock(clock: Shown) -> str:
    stands = "" if clock["running"] else ", stands still"
    return f"{clock['name']}: {clock['left']:.1f} s left of {clock['seconds']:.1f} s{stands}"


def _frames(found: Shown) -> str:
    counters = found["counters"]

    def one(way: str) -> str:
        since = found[f"seconds_since_{way}"]
        last = "" if since is None else f", the last {since:.1f} s ago"
        return f"{counters.get(f'frames_{way}', 0)} {way} ({counters.get(f'bytes_{way}', 0)} bytes{last})"

    lost = "".join(f", {counters[name]} {name}" for name in ("noise", "spilled", "dropped") if counters.get(name))
    return f"{one('in')}, {one('out')}{lost}"


def _tree(tree: list[Shown]) -> Iterator[str]:
    """Parents before their children, each generation further in. Whoever has no parent among them is a root."""
    known = {each["pid"] for each in tree}
    children: dict[int | None, list[Shown]] = {}
    for each in tree:
        children.setdefault(each["parent"] if each["parent"] in known else None, []).append(each)
    ahead = [(each, 0) for each in reversed(children.get(None, []))]
    while ahead:
        each, depth = ahead.pop()
        size = "" if each["rss_bytes"] is None else f" {each['rss_bytes'] / (1 << 20):.0f} MiB"
        command = as_line(each["command"], characters_max=COMMAND_CHARACTERS_MAX)
        yield f"{'  ' * depth}{each['pid']} {each['state']}{size} {command}"
        # Taken out, so that a circle, which a pid that was used again could make, ends.
        ahead += [(child, depth + 1) for child in reversed(children.pop(each["pid"], []))]


def _show_stacks(stacks: Shown) -> None:
    for kind in ("tasks", "threads"):
        for each in stacks[kind]:
            coroutine = f" {each['coroutine']}" if each.get("coroutine") else ""
            say(as_line(f"{kind.removesuffix('s')} {each['name']}{coroutine}"))
            for entry in each["stack"]:
                for line in str(entry).splitlines():
                    say(f"    {as_text(line)}")
