"""Helpers for the benchmarks of sessions: the command of the tiny agent, and one complete turn."""

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
