"""Logs with frames of several dialects: each recorded frame is nothing to the dialects of other agents."""

from __future__ import annotations

import pytest
from tests.core.dialects.recordings import corpus

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.log_dialect import MixedReader

DIALECTS: tuple[Dialect, ...] = (CLAUDE, CODEX, Acp())


def recordings() -> list[tuple[str, Dialect]]:
    files = sorted(path.stem for path in corpus.FOLDER.glob("*.jsonl"))
    by_name: dict[str, Dialect] = {"claude": CLAUDE, "codex": CODEX, "acp": DIALECTS[2], "acp400": DIALECTS[2]}
    return [(name, by_name[name.partition("-")[0]]) for name in files if name != "codex-exec"]


@pytest.mark.parametrize(("name", "own"), recordings())
def test_recorded_frame_is_nothing_to_other_dialects(name: str, own: Dialect) -> None:
    others = [dialect for dialect in DIALECTS if dialect is not own]
    for line in corpus.lines(name):
        for other in others:
            assert other.project(line) in ([], own.project(line)), line
            assert other.partial(line) in ([], own.partial(line)), line


@pytest.mark.parametrize("first", DIALECTS)
@pytest.mark.parametrize(("name", "own"), recordings())
def test_reader_of_any_session_reads_frames_of_each_dialect(name: str, own: Dialect, first: Dialect) -> None:
    reader, lines = MixedReader(first), corpus.lines(name)
    assert [reader.project(line) for line in lines] == [own.project(line) for line in lines]
    assert [reader.partial(line) for line in lines] == [own.partial(line) for line in lines]
    expected, found = own.projector(), reader.projector()
    assert [found.project(line) for line in lines] == [expected.project(line) for line in lines]
    said, heard = own.transcript(), reader.transcript()
    for line in lines:
        said.add(line)
        heard.add(line)
    assert heard.text() == said.text()
