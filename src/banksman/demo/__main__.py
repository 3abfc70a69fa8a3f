"""`python -m banksman.demo [--agent NAME]`: the tour with the scripted agent; or a session with a real one, which is
started only for whoever names it, with their own settings and at their own cost."""

from __future__ import annotations

import asyncio
import sys

from banksman.demo import crash, session, tree
from banksman.errors import BanksmanError

USAGE = "usage: python -m banksman.demo [--agent NAME]    (make run, make run AGENT=claude)"


def main(words: list[str]) -> int:
    match words:
        case [] | ["--agent", ""]:
            tree.main()
            print()
            crash.tour()
            print()
            asyncio.run(session.tour())
            print("\nCommands from a shell:  banksman exec --timeout 60 -- make test")
        case ["--agent", name]:
            asyncio.run(session.talk(name))
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BanksmanError as exc:
        sys.exit(f"{exc}")
