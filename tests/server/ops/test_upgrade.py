"""`banksman upgrade`: the new version checks first, and then continues what the old one runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.process.helpers import wait_until
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import Served
from tests.server.ops.test_server_hand_over import echo, output, reap, say, serving

from banksman.errors import Refused
from banksman.process.keeper import messages
from banksman.server.ops import upgrade
from banksman.server.server_settings import ServerSettings
from banksman.store.sqlite.store_health import check_schema

# A version with another word on the wire of the keepers, and one with another name.
OTHER = """
import sys
from banksman.process.keeper import messages
{change}
from banksman.cli import main
sys.exit(main())
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "server") as served:
        yield served


def version(tmp_path: Path, change: str) -> list[str]:
    """Return the command of a version of Banksman that differs by this statement."""
    program = tmp_path / "other.py"
    program.write_text(OTHER.format(change=change), encoding="utf-8")
    return [sys.executable, str(program)]


def started(served: Served) -> float:
    return float(served.get("/v1/server")["started"])


@pytest.mark.thorough
def test_upgrade_continues_commands_in_the_same_process(served: Served, tmp_path: Path) -> None:
    id = echo(served)
    pid, before = served.pid, started(served)
    new = version(tmp_path, 'from banksman.server.ops import upgrade; upgrade.__version__ = "99.0"')
    assert served.post("/v1/upgrade", {"command": new}) == {"version": "99.0"}
    # The port is open all the time. Requests of the old server may be cut.
    wait_until(lambda: is_new(served, before), "the new version")
    say(served, id, "upgraded")
    assert served.get("/v1/server")["pid"] == pid
    # The next restart is one like any other.
    served.post("/v1/drain", {"hand_over": True})
    reap(served)
    served.start()
    say(served, id, "again")
    served.post(f"/v1/commands/{id}/stdin", {"end": True})
    assert output(served, id).endswith("heard upgraded\nheard again\nend\n")


def is_new(served: Served, before: float) -> bool:
    try:
        return started(served) != before
    except (OSError, AssertionError):
        return False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            'messages.WIRE = b"banksman-keeper-99"',
            f"wire is '{messages.WIRE.decode()}', this version has 'banksman-keeper-99'",
        ),
        ('from banksman.commands import command_state; command_state.WORD = b"new"', "command is"),
        ("from banksman.store.sqlite import tables; tables.SCHEMA = 99", "the store has schema 1, this version 99"),
        ('raise SystemExit("it does not start")', "it does not start"),
    ],
)
def test_upgrade_to_a_version_that_cannot_take_over_changes_nothing(
    served: Served, tmp_path: Path, change: str, reason: str
) -> None:
    session = served.open({"prompt work": ["say done"]})
    id, before = echo(served), started(served)
    answer = served.request("POST", "/v1/upgrade", {"command": version(tmp_path, change)})
    assert answer.status == 409
    assert reason in answer.json["detail"]
    assert started(served) == before
    say(served, id, "still")
    assert served.outcome(session, served.ask(session, "work"))["text"] == "done"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("from banksman.core.session.turn import Turn; Turn.__name__ = 'Other'", "'Turn' is unknown in this version"),
        (
            "from banksman.core.session import live_state as it; it.NAMES = tuple({*it.NAMES} - {'head'})",
            "Session.head is unknown in this version",
        ),
    ],
)
def test_upgrade_to_a_version_that_cannot_read_the_state_of_a_session_keeps_its_turn(
    served: Served, tmp_path: Path, change: str, reason: str
) -> None:
    go = tmp_path / "go"
    session = served.open({"prompt work": ["say one", f"wait {go}", "say two"]})
    turn, before = served.ask(session, "work"), started(served)
    wait_for(served, session, "update", turn=turn)
    answer = served.request("POST", "/v1/upgrade", {"command": version(tmp_path, change)})
    assert (answer.status, reason in answer.json["detail"]) == (409, True), answer
    assert started(served) == before
    go.touch()
    assert served.outcome(session, turn)["text"] == "two"


def test_upgrade_to_a_missing_command_changes_nothing(served: Served) -> None:
    answer = served.request("POST", "/v1/upgrade", {"command": ["/nowhere/banksman"]})
    assert answer.status == 409
    assert started(served) == started(served)


def test_check_refuses_an_offer_that_it_does_not_know(tmp_path: Path) -> None:
    settings = ServerSettings(store=f"sqlite:{tmp_path / 'store.db'}")
    offered = upgrade.offer(settings)

    def answer(offer: object) -> upgrade.UpgradeAccepted:
        return upgrade.answer(settings, msgspec.json.encode(offer), check_schema)

    assert answer(offered).version
    # Of an older version.
    assert answer(msgspec.structs.replace(offered, names={})).version
    for change in (
        msgspec.structs.replace(offered, scope="sqlite:/other"),
        msgspec.structs.replace(offered, formats={**offered.formats, "wire": "banksman-keeper-0"}),
        msgspec.structs.replace(offered, formats={**offered.formats, "new": "1"}),
        msgspec.structs.replace(offered, names={**offered.names, "New": []}),
        {**msgspec.to_builtins(offered), "new": 1},
        {},
    ):
        with pytest.raises(Refused, match="cannot take over"):
            answer(change)
    # The check of a store that does not exist creates none.
    assert list(tmp_path.iterdir()) == []
