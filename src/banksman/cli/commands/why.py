"""`banksman why`: explain what a session is doing and what it waits for. Read-only.

`--stacks` prints the stacks of the server's tasks and threads, with or without a session.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from typing import Any, cast

from banksman.cli import OK
from banksman.cli.client.client import segment
from banksman.cli.output import as_line, as_text, how_to_answer, say, say_json, stdout_style
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.question_view import block_rows, subject_of, title_of
from banksman.cli.tui.session_table import (
    Shown,
    budget_in_words,
    cap_in_words,
    colour_of,
    limit_in_words,
    money,
    retry_in_words,
)

COMMAND_CHARACTERS_MAX = 60
PROMPT_CHARACTERS_MAX = 120
FRAME_CHARACTERS_MAX = 200


def parser() -> ServerParser:
    flags = ServerParser(
        "why",
        "[SESSION] [--stacks]",
        "Explain what a session is doing and waiting for: "
        "its owner, queue, questions, watchdogs and processes.",
        "banksman why fix-ci",
    )
    flags.add_argument("session", nargs="?", metavar="SESSION", help="id or name of the session")
    flags.add_argument(
        "--stacks",
        action="store_true",
        help="print the stack of every task and thread of the server",
    )
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if arguments.session is None and not arguments.stacks:
        flags.error("pass a session, or --stacks for the server itself")
    return perform(_why, arguments)


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
            if found:
                _show(found)
            if stacks is not None:
                _show_stacks(stacks)
    return OK


def _show(found: Shown) -> None:
    style = stdout_style()
    for name, lines in _account(found):
        for number, line in enumerate(lines):
            label = "" if number else name
            # The name of a state contains no text of an agent, so it needs no escaping.
            shown = colour_of(style, line)(line) if name == "state" else as_line(line)
            say(f"{style.dim(label)}{' ' * (10 - len(label))}{shown}")


def _account(found: Shown) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of each topic. A topic without lines is not shown."""
    name = f" ({found['name']})" if found["name"] else ""
    folder = f", in {found['cwd']}" if found.get("cwd") else ""
    yield "session", [f"{found['id']}{name}, {found['agent']}{folder}"]
    yield "state", [as_line(found["state"])] if found.get("state") else []
    place = ", waits for a place in the process pool" if found["waits_for_place"] else ""
    yield "phase", [f"{found['phase']}{place}"]
    if found["owner"] is not None:
        address = found["owner"]["address"]
        yield (
            "owner",
            [
                f"process {found['owner']['pid']} "
                f"{f'at {address}' if address else 'on this machine'}"
            ],
        )
    if found.get("host"):
        yield "host", [str(found["host"])]
    yield "contained", list(_containment(found.get("containment", {})))
    yield "holder", list(_holder(found))
    yield "agents", [_agent(each, found["agent"]) for each in found.get("fallback", ())]
    yield "retry", [_retry(found["retry"])] if found.get("retry") else []
    yield "limits", list(_limits(found))
    yield "budget", list(_budget(found))
    yield "queue", [_waiting(each) for each in found["queue"]] or ["empty"]
    yield "questions", _questions(found)
    yield "requests", [_request(each) for each in found.get("requests", ())]
    yield "clocks", [_clock(each) for each in found["clocks"]]
    yield "timers", [f"{name}: in {seconds:.1f} s" for name, seconds in found["timers"].items()]
    yield "frames", [_frames(found)]
    yield "last in", _frame(found.get("last_in"))
    yield "last out", _frame(found.get("last_out"))
    cost = money(found["cost"])
    yield "cost", [] if cost is None else [cost]
    yield "tree", list(_tree(found["tree"]))


def _containment(contained: Shown) -> Iterator[str]:
    for name, value in contained.items():
        match value:
            case None:
                pass
            case _ if name == "why_not":
                if contained.get("limits"):
                    yield f"no control group: {value}"
            case dict() if name == "cgroup":
                yield _cgroup(cast("Shown", value))
            case dict():
                limits = cast("dict[str, Any]", value)
                yield f"{name}: {', '.join(f'{each}={number}' for each, number in limits.items())}"
            case list():
                yield f"{name}: {shlex.join(cast('list[str]', value)) or 'none'}"
            case _:
                yield f"{name}: {value}"


def _cgroup(group: Shown) -> str:
    memory, peak, most = (
        None if (size := group[name]) is None else f"{size / (1 << 20):.0f} MiB"
        for name in ("memory_bytes", "memory_bytes_peak", "memory_bytes_max")
    )
    used: list[str] = []
    if memory:
        used.append(f"memory {memory}{f' of {most}' if most else ''}")
    if peak:
        used.append(f"at most {peak} so far")
    if group["processes"] is not None:
        of = "" if group["processes_max"] is None else f" of {group['processes_max']}"
        used.append(f"processes {group['processes']}{of}")
    if group["cpu_seconds"] is not None:
        used.append(f"{group['cpu_seconds']:.1f} s of CPU")
    if group["cpus_max"] is not None:
        used.append(f"up to {group['cpus_max']:g} CPUs")
    return f"cgroup: {group['path']}: {', '.join(used) or 'not measured'}"


def _holder(found: Shown) -> Iterator[str]:
    if found["holder"]:
        caller = found.get("holder_caller")
        by = "" if caller is None else f", asked by {caller}"
        yield f"{found['holder']}{by}{_since(found.get('holder_since'))}"
        if found.get("holder_prompt"):
            yield _cut(found["holder_prompt"], PROMPT_CHARACTERS_MAX)
    # A server of an earlier version tells only the id.
    holds: list[Shown] = found.get("holds") or []
    if not holds and found["hold"]:
        yield f"hold {found['hold']}"
    for hold in holds:
        by = "" if hold["caller"] is None else f" of {hold['caller']}"
        at = ", waits in the queue" if hold["at"] is None else _since(hold["at"])
        yield f"hold {hold['hold']}{by}, priority {hold['priority']}{at}"
    if not found["holder"] and not found["hold"] and not holds:
        yield "none"


def _since(at: float | None) -> str:
    return "" if at is None else f", since {time.strftime('%H:%M:%S', time.localtime(at))}"


def _agent(agent: Shown, serving: str) -> str:
    until = agent["limited_until"]
    at = "" if until is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
    facts = (
        "serves the session" if agent["name"] == serving else "",
        f"limited until {at}" if at else "",
        "not installed" if agent["missing"] else "",
    )
    return ", ".join((agent["name"], *filter(None, facts)))


def _retry(retry: Shown) -> str:
    return f"{retry_in_words(retry)}: {_cut(retry['cause'], PROMPT_CHARACTERS_MAX)}"


def _budget(found: Shown) -> Iterator[str]:
    over = budget_in_words(found)
    if over is not None:
        yield over
    yield from (cap_in_words(use) for use in found.get("budget", ()))


def _limits(found: Shown) -> Iterator[str]:
    limit = limit_in_words(found, time.time())
    if limit is not None:
        yield _wait_for_limit(found) if found.get("waits_for_limit") else limit
    for window in found.get("limits", ()):
        used = "" if window["used"] is None else f", {100 * window['used']:.0f} % used"
        resets = window["resets_at"]
        at = "" if resets is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(resets))
        yield f"{window['name']}{used}{f', resets at {at}' if at else ''}"


def _wait_for_limit(found: Shown) -> str:
    until, asks = found["limited_until"], len(found["queue"])
    at = "" if until is None else time.strftime(" until %H:%M UTC on %Y-%m-%d", time.gmtime(until))
    waiting = f"{asks} ask{' waits' if asks == 1 else 's wait'}"
    return f"waits for the account's limit{at}; {waiting}"


def _questions(found: Shown) -> list[str]:
    """List the open questions, each with the command that answers it.

    If another host owns the session, or the session has no process, only the ids are known from the
    log. The question cannot be answered here, so no command is shown.
    """
    known = {each["id"]: each for each in found.get("asked", ())}
    lines: list[str] = []
    for id in found["questions"]:
        if id in known:
            lines += block_rows(subject_of(known[id]))
            lines.append(f"{id}: {title_of(known[id])}")
            lines.append(f"  {how_to_answer(found['name'] or found['id'], id)}")
        else:
            lines.append(f"{id} waits for an answer")
    return lines


def _waiting(each: Shown) -> str:
    again = "" if each["attempt"] == 1 else f", attempt {each['attempt']}"
    prompt = f": {_cut(each['prompt'], PROMPT_CHARACTERS_MAX)}" if each.get("prompt") else ""
    by = f" by {each['caller']}" if each.get("caller") else ""
    waits = f"priority {each['priority']}, for {each['seconds']:.1f} s{again}"
    return f"{each['turn']}{by}, {waits}{prompt}"


def _request(each: Shown) -> str:
    since = "" if each["seconds"] is None else f", for {each['seconds']:.1f} s"
    return f"{each['kind']} ({each['id']}), not answered yet{since}"


def _frame(frame: Shown | None) -> list[str]:
    if frame is None:
        return []
    at = time.strftime("%H:%M:%S", time.localtime(frame["at"]))
    return [f"{at} {_cut(frame['text'], FRAME_CHARACTERS_MAX)}"]


def _cut(text: str, characters_max: int) -> str:
    return as_line(" ".join(text.split()), characters_max=characters_max)


def _clock(clock: Shown) -> str:
    stands = "" if clock["running"] else ", paused"
    return f"{clock['name']}: {clock['left']:.1f} s left of {clock['seconds']:.1f} s{stands}"


def _frames(found: Shown) -> str:
    counters = found["counters"]

    def one(way: str) -> str:
        since = found[f"seconds_since_{way}"]
        last = "" if since is None else f", the last {since:.1f} s ago"
        return (
            f"{counters.get(f'frames_{way}', 0)} {way} "
            f"({counters.get(f'bytes_{way}', 0)} bytes{last})"
        )

    lost = "".join(
        f", {counters[name]} {name}"
        for name in ("noise", "spilled", "dropped")
        if counters.get(name)
    )
    return f"{one('in')}, {one('out')}{lost}"


def _tree(tree: list[Shown]) -> Iterator[str]:
    """Yield the processes, parents before children, indented by generation.

    A process whose parent is not in the list is a root.
    """
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
        # pop() removes the entry. A reused pid could make a cycle of parents, and the loop must
        # end.
        ahead += [(child, depth + 1) for child in reversed(children.pop(each["pid"], []))]


def _show_stacks(stacks: Shown) -> None:
    for kind in ("tasks", "threads"):
        for each in stacks[kind]:
            coroutine = f" {each['coroutine']}" if each.get("coroutine") else ""
            say(as_line(f"{kind.removesuffix('s')} {each['name']}{coroutine}"))
            for entry in each["stack"]:
                for line in str(entry).splitlines():
                    say(f"    {as_text(line)}")
