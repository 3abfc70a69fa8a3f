"""Hand-over of a tree that runs as another user: the lease of the next host, and the death of that host, end it."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.process import other_user
from tests.process.helpers import NOBODY, alive, child, wait_said
from tests.process.test_tree_hand_over import STUBBORN, adopt, hand, take

from banksman import Command
from banksman.commands.options import Options
from banksman.process.launch import prepare
from banksman.process.lease_page import LeasePage

pytestmark = pytest.mark.skipif(other_user.why_not() != "", reason=other_user.why_not())
# Longer than a slow machine needs for the claim.
LEASE_SECONDS = 5.0


@pytest.fixture
def place() -> Generator[Path]:
    with other_user.folder() as folder:
        yield folder


@pytest.mark.thorough
async def test_lease_of_the_next_host_ends_the_tree_of_another_user(place: Path, marker: str) -> None:
    argv = other_user.reachable(child(STUBBORN, marker), place)
    launch = prepare(argv, cwd=str(place), user=NOBODY)
    first = Command(launch, Options(stdin="pipe", grace=0.2), id="first", on_end=lambda _: None)
    await wait_said(first, "ready")
    assert {Path(f"/proc/{pid}").stat().st_uid for pid in alive(marker)} == {NOBODY}
    # The processes ignore TERM, so the keeper must be able to kill them.
    now = time.monotonic()
    lease = LeasePage(now + LEASE_SECONDS, now + 2 * LEASE_SECONDS)
    done = await adopt(await take(await hand(first), lease=lease)).wait()
    assert done.survivors == ()
    assert alive(marker) == []
    lease.close()
