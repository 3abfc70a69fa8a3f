"""Entry point of the fake Codex, run by path in an isolated interpreter (see `fake_agent`)."""

import sys

sys.path.append(__file__.rsplit("/banksman/", 1)[0])

from banksman.testing.fake_codex.codex_agent import main

main(sys.argv[1:])
