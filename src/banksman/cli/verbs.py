"""The verbs that ask a server, by name."""

from __future__ import annotations

from banksman.cli.acting import answer, interrupt
from banksman.cli.ask import ask
from banksman.cli.log import log
from banksman.cli.looking import ps, why
from banksman.cli.opening import close_session, drain, open_session

_VERBS = {
    "answer": answer,
    "ask": ask,
    "close": close_session,
    "drain": drain,
    "interrupt": interrupt,
    "log": log,
    "open": open_session,
    "ps": ps,
    "why": why,
}


def run_verb(name: str, words: list[str]) -> int:
    return _VERBS[name](words)
