"""The command line: one file per group of verbs, loaded only when its verb is called."""

from __future__ import annotations

import sys

HELP = """\
usage: banksman [--version] [--help] VERB …

Runs commands and coding agents as subprocesses, and ends them: the whole tree, every time.

verbs:
  acp        be an ACP agent for an editor, with supervised sessions behind it
  exec       run a command; when it is over, nothing of it is left
  agents     which agents are known, what each can do, and which are here
  serve      serve sessions and commands over HTTP

verbs that ask a server:
  open       open a session with an agent
  ask        ask the agent something, and watch it answer
  interrupt  stop a turn
  answer     answer a question of the agent's
  close      close a session
  ps         what there is
  why        what a session is doing, and what it waits for
  log        what was said in a session, and is being said
  drain      let the server finish what runs, and exit

`banksman VERB --help` says more. Example:
  banksman exec --timeout 60 -- make test
"""
OWN_FAILURE, INTERRUPTED = 125, 130


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        return _verb(words)
    except KeyboardInterrupt:
        # Before a verb listens to signals, or after: there is nothing to end. Whoever asks twice gets no traceback.
        import signal  # noqa: PLC0415

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED


def _verb(words: list[str]) -> int:
    match words:
        case [] | ["-h" | "--help" | "help", *_]:
            print(HELP, end="")
            return 0 if words else OWN_FAILURE
        case ["--version", *_]:
            from banksman import __version__  # noqa: PLC0415

            print(f"banksman {__version__}")
            return 0
        case ["acp", *rest]:
            from banksman.cli.acp.main import acp  # noqa: PLC0415

            return acp(rest)
        case ["exec", *rest]:
            from banksman.cli.exec import run  # noqa: PLC0415

            return run(rest)
        case ["serve", *rest]:
            from banksman.cli.serve import serve  # noqa: PLC0415

            return serve(rest)
        case ["agents", *rest]:
            from banksman.cli.agents import agents  # noqa: PLC0415

            return agents(rest)
        case [("ps" | "why" | "log" | "ask" | "interrupt" | "answer" | "open" | "close" | "drain") as verb, *rest]:
            from banksman.cli.verbs import run_verb  # noqa: PLC0415

            return run_verb(verb, rest)
        case _:
            print(f"banksman: there is no verb {words[0]!r}; see banksman --help", file=sys.stderr)
            return OWN_FAILURE
