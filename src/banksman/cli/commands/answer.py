"""`banksman answer`: answer an open question of an agent."""

from __future__ import annotations

import argparse
from typing import Any

from banksman.cli import NOT_DONE, OK
from banksman.cli.client.client import segment
from banksman.cli.output import as_line, say, say_aside, say_json
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.question_view import block_rows, subject_of, title_of
from banksman.errors import UsageError


def parser() -> ServerParser:
    flags = ServerParser(
        "answer",
        "SESSION [QUESTION] allow|deny [--message TEXT]",
        "Answer a question of the agent. QUESTION may be omitted if exactly one is open.",
        'banksman answer fix-ci deny --message "not in this folder"',
    )
    flags.add_argument(
        "words",
        nargs="+",
        metavar="SESSION [QUESTION] DECISION",
        help="allow, deny, or an option's id",
    )
    flags.add_argument("--message", metavar="TEXT", help="text for the agent, sent with the answer")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    match arguments.words:
        case [session, decision]:
            arguments.session, arguments.question, arguments.decision = session, None, decision
        case [session, question, decision]:
            arguments.session, arguments.question, arguments.decision = session, question, decision
        case _:
            flags.error("pass SESSION and DECISION, with at most one QUESTION between them")
    return perform(_answer, arguments)


def _answer(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    path = f"/v1/sessions/{segment(arguments.session)}/questions"
    question: str | None = arguments.question
    if question is None:
        asked = _only_one(arguments.session, client.get(path)["questions"])
        question = str(asked["id"])
        if arguments.format == "text":
            for line in (*block_rows(subject_of(asked)), title_of(asked)):
                say_aside(line)
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
            by = "" if given["first"] else f" (already answered by {given['by']})"
            say(as_line(f"{given['question']}: {given['answer']}{by}"))
    # A question gets exactly one answer. If another client's answer came first and differs, this
    # verb has not done its work.
    return OK if given["first"] or given["answer"] == arguments.decision else NOT_DONE


def _only_one(session: str, questions: list[dict[str, Any]]) -> dict[str, Any]:
    if len(questions) == 1:
        return questions[0]
    if not questions:
        raise UsageError(f"cannot answer: no question is open in session {session}")
    names = ", ".join(f"{each['id']} ({each['tool'] or each['wants']})" for each in questions)
    hint = "pass the id of one; `banksman why` shows each in full"
    raise UsageError(
        f"cannot answer: {len(questions)} questions are open in session {session}: {names}",
        hint=hint,
    )
