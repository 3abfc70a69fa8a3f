"""docs/reference lists exactly the event kinds, the configuration keys and the metrics of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import fields

from banksman import Host
from banksman.config.config_file import as_toml
from banksman.config.keys import KEYS
from banksman.server.api.messages.event_messages import BODIES, Event
from banksman.server.ops import metrics
from banksman.server.streams.follower import StreamCounts

PAGES = Path(__file__).resolve().parent.parent / "docs" / "reference"


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the cells of each table, with its header and without the line below the header."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [head, *rows]


def rows(text: str, first: str) -> list[list[str]]:
    """Return the rows of all tables whose first column has this header."""
    return [row for head, *found in tables(text) if head[0] == first for row in found]


def names(text: str, first: str) -> list[str]:
    return [row[0].strip("`") for row in rows(text, first)]


def test_events_page_has_every_kind_with_its_members() -> None:
    beginning, *sections = re.split(r"^### ", (PAGES / "events.md").read_text(), flags=re.MULTILINE)
    assert names(beginning, "member") == [field.name for field in fields(Event)]
    # The heading of a kind is its name in backticks.
    found = {section.splitlines()[0].strip("`"): names(section, "member") for section in sections}
    assert len(found) == len(sections), "a kind has two sections"
    assert found == {kind: [field.encode_name for field in fields(body)] for kind, body in BODIES.items()}


def test_configuration_page_has_every_key_with_variable_and_default() -> None:
    found = rows((PAGES / "configuration.md").read_text(), "key")
    assert sorted(row[0].strip("`") for row in found) == sorted(KEYS)
    for name, default, variable, *_ in found:
        key = KEYS[name.strip("`")]
        assert variable == f"`{key.variable}`"
        if key.default is not None:
            assert default == f"`{as_toml(key.default)}`", name


async def test_metrics_page_has_every_metric_with_its_type() -> None:
    async with Host("memory:") as host:
        rendered = metrics.render(host, StreamCounts()).decode()
    found = [(row[0].strip("`"), row[1]) for row in rows((PAGES / "metrics.md").read_text(), "metric")]
    assert sorted(found) == sorted(re.findall(r"^# TYPE (\S+) (\S+)$", rendered, re.MULTILINE))
