"""Detect the dialect of a frame from the frame alone, so that a log can be read without the agent's profile."""

from __future__ import annotations

import pytest
from tests.core.dialects.recordings import corpus

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.log_dialect import UNKNOWN, dialect_of

RECORDED: dict[str, Dialect] = {
    "claude-B-interrupt-stream": CLAUDE,
    "codex-D-approval": CODEX,
    "acp-opencode-basic": Acp(),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_frames_are_recognised_by_dialect(name: str) -> None:
    dialect = RECORDED[name]
    lines = corpus.lines(name)
    assert {dialect_of(line).name for line in lines} == {dialect.name}
    assert [UNKNOWN.project(line) for line in lines] == [dialect.project(line) for line in lines]
    known, unknown = dialect.projector(), UNKNOWN.projector()
    assert [unknown.project(line) for line in lines] == [known.project(line) for line in lines]
    said, heard = dialect.transcript(), UNKNOWN.transcript()
    for line in lines:
        said.add(line)
        heard.add(line)
    assert heard.text() == said.text() is not None


@pytest.mark.parametrize("line", [b"", b"no JSON", b"[]", b"7", b"{", b'{"type":"banksman.spilled"}', b"\xff"])
def test_unrecognised_frame_projects_to_nothing(line: bytes) -> None:
    assert UNKNOWN.project(line) == []
    assert UNKNOWN.projector().project(line) == []
