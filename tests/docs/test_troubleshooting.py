"""The pages quote texts that the package prints. docs/troubleshooting.md quotes most of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.docs import texts
from tests.docs.blocks import FENCE, PAGES, ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# The first column of these tables has what a reader sees. The others explain it.
HEADS = ("you see", "finding", "line")
# A span of code has no empty line.
CODE = re.compile(r"(?<!`)(`+)(?!`)((?:.|\n(?!\n))+?)(?<!`)\1(?!`)")
# How an error or a log line begins.
ERRORS = ("cannot ", "no server ", "session … ", "the agent ", "the host ", "the session ", "there is no ", "unknown: ")


def quotes(heads: tuple[str, ...] = HEADS) -> Iterator[str]:
    """Yield each text and each name in the first columns with these heads."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *rows = [row.split(" | ")[0].strip("| ") for row in table.splitlines()]
        assert head in HEADS, f"a table has another first column: {head}"
        if head not in heads:
            continue
        for row in rows:
            for _, quote in CODE.findall(row):
                yield quote.strip()


@pytest.mark.thorough
def test_troubleshooting_page_quotes_texts_of_the_package() -> None:
    found = list(quotes())
    assert len(found) > 100
    assert [quote for quote in found if not texts.is_known(quote)] == []


def test_troubleshooting_page_has_every_warning_and_error_of_the_log() -> None:
    lines = dict(texts.log_lines())
    assert len(lines) > 90
    assert [place for place, line in lines.items() if line is None] == []
    shown = set(quotes(("line",)))
    assert [(place, line) for place, line in lines.items() if line and not texts.is_shown(line, shown)] == []


def test_log_line_is_shown_if_one_quote_has_its_words() -> None:
    line = f"accept failed: {texts.GAP}, retrying in {texts.GAP} s"
    assert texts.is_shown(line, ["accept failed: Too many open files, retrying in 1 s"])
    assert texts.is_shown(line, ["accept failed: …, retrying in … s"])
    assert not texts.is_shown(line, ["accept failed: …"])
    # A quote with more gaps than the line is another line.
    assert not texts.is_shown(f"cannot read {texts.GAP}", ["cannot read …: …"])


@pytest.mark.thorough
def test_pages_quote_error_texts_of_the_package() -> None:
    found = [
        (path.name, " ".join(quote.split()))
        for path in PAGES
        for _, quote in CODE.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
        if quote.startswith(ERRORS)
    ]
    assert len(found) > 40
    assert [(name, quote) for name, quote in found if not texts.is_known(quote)] == []


@pytest.mark.thorough
def test_quote_is_known_if_the_package_has_its_fixed_parts() -> None:
    known = [
        "the token is missing or wrong",
        # The text of the package has gaps. The quote has gaps too, or values.
        "the queue is full: … asks are waiting",
        "the queue is full: 256 asks are waiting",
        # An error with its hint.
        "there is no session 'fix-cl' (see banksman ps)",
        "StoreFull",
        "outcome=unknown",
    ]
    unknown = [
        "outcome=unheard",
        "the token is lost or wrong",
        "the queue is full: 256 questions are waiting",
        "session … is not ours any more: …",
        "cannot bake …: …",
    ]
    assert [quote for quote in [*known, *unknown] if texts.is_known(quote)] == known
