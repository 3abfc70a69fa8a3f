"""`banksman interrupt` and `banksman answer`: a word to a turn that runs, or that waits for one."""

from __future__ import annotations

import argparse
from typing import Any

from banksman.cli.client import Client, segment
from banksman.cli.terminal import as_line, say, say_json
from banksman.cli.verb import NOT_DONE, OK, Parser, client_of, perform
from banksman.errors import UsageError


def interrupt(words: list[str]) -> int:
    parser = Parser(
        "interrupt",
        "SESSION [TURN]",
        "Stop the turn that runs now, or this one: withdraw it if it still waits. Returns when it is over.",
        "banksman interrupt fix-ci",
    )
    parser.add_argument("session", metavar="SESSION", help="its id or its name")
    parser.add_argument("turn", nargs="?", metavar="TURN", help="the turn (else the one that runs)")
    return perform(_interrupt, parser.read(words))


def answer(words: list[str]) -> int:
    parser = Parser(
        "answer",
        "SESSION [QUESTION] allow|deny [--message TEXT]",
        "Answer a question of the agent's. It may be left out if exactly one is open.",
        'banksman answer fix-ci deny --message "not in this folder"',
    )
    parser.add_argument(
        "words", nargs="+", metavar="SESSION [QUESTION] DECISION", help="allow, deny, or an option's id"
    )
    parser.add_argument("--message", metavar="TEXT", help="said to the agent with the answer")
    arguments = parser.read(words)
    match arguments.words:
        case [session, decision]:
            arguments.session, arguments.question, arguments.decision = session, None, decision
        case [session, question, decision]:
            arguments.session, arguments.question, arguments.decision = session, question, decision
        case _:
            parser.error("a session and a decision are needed, with a question between them at most")
    return perform(_answer, arguments)


def interrupt_turn(client: Client, session: str, turn: str | None) -> dict[str, Any]:
    """The receipt."""
    place = "" if turn is None else f"/turns/{segment(turn)}"
    return client.post(f"/v1/sessions/{segment(session)}{place}/interrupt")


def receipt_in_words(receipt: dict[str, Any]) -> str:
    queued = len(receipt["queued"])
    rest = f"; {queued} still queued" if queued else ""
    if not receipt["stopped"]:
        return f"not stopped: {str(receipt['by']).replace('_', ' ')}{rest}"
    return f"stopped, by {receipt['by']}{rest}"


def _interrupt(arguments: argparse.Namespace) -> int:
    receipt = interrupt_turn(client_of(arguments), arguments.session, arguments.turn)
    match arguments.format:
        case "json":
            say_json(receipt)
        case "quiet":
            pass
        case _:
            say(as_line(receipt_in_words(receipt)))
    return OK


def _answer(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    path = f"/v1/sessions/{segment(arguments.session)}/questions"
    question: str = arguments.question or _only_one(client.get(path)["questions"])
    body = {"decision": arguments.decision}
    if arguments.message is not None:
        body["message"] = arguments.message
    given = client.post(f"{path}/{segment(question)}", body)
    match arguments.format:
        case "json":
            say_json(given)
        case "quiet":
            pass
        case _:
            by = "" if given["first"] else f", already, by {given['by']}"
            say(as_line(f"{given['question']}: {given['answer']}{by}"))
    # A question has one answer. If somebody else's came first, ours did not do what it was for.
    return OK if given["first"] or given["answer"] == arguments.decision else NOT_DONE


def _only_one(questions: list[dict[str, Any]]) -> str:
    if len(questions) == 1:
        return str(questions[0]["id"])
    if not questions:
        raise UsageError("no question is open in this session")
    names = ", ".join(f"{each['id']} ({each['tool'] or each['wants']})" for each in questions)
    raise UsageError(f"{len(questions)} questions are open: {names}", hint="say which")
