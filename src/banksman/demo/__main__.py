"""`python -m banksman.demo`: start the demo server, the guided tour, or a talk with an agent.

- No argument: the server, with scripted agents at work.
- `tour`: a guided tour in a terminal.
- `talk NAME`: a session with a real agent. It starts only when the user names it, because it runs
  with the user's settings and at the user's cost.
"""

from __future__ import annotations

import asyncio
import sys

from banksman.errors import BanksmanError

USAGE = """\
usage: python -m banksman.demo [--port PORT]    (make run)
       python -m banksman.demo tour             (make tour)
       python -m banksman.demo talk AGENT       (make tour AGENT=claude)"""


def main(words: list[str]) -> int:
    match words:
        case [] | ["--port", _]:
            from banksman.demo import server  # noqa: PLC0415

            return server.serve(words[1] if words else "")
        case ["tour"] | ["talk", ""]:
            from banksman.demo import tour  # noqa: PLC0415

            tour.run()
        case ["talk", name]:
            from banksman.demo import tour  # noqa: PLC0415

            asyncio.run(tour.talk(name))
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BanksmanError as exc:
        sys.exit(f"{exc}")
