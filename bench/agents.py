"""What the benchmarks of sessions share: the tiny agent's command, and a session's small change."""

from __future__ import annotations

import sys
from pathlib import Path

import banksman

TINY = Path(__file__).with_name("tiny_agent.py")


def tiny(times: str | None = None) -> list[str]:
    return [sys.executable, "-I", "-S", str(TINY), *([] if times is None else [times])]


async def done(session: banksman.Session, prompt: str) -> banksman.Outcome:
    outcome = await (await session.ask(prompt)).outcome()
    assert outcome.kind is banksman.Kind.DONE, outcome
    return outcome
