"""Kill matrix of `guard`: every ending × every shape of tree × both roles leaves no process.

The trees and the count from outside are those of `tests/process/test_kill_matrix.py`. Each wait for the end is shorter
than the life that bounds the trees, so a tree that ends by itself fails its cell. Two controls at the end: a cell
without its ending must fail, and the same trees without a guard must leave some processes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.guard.running import CALLER, guard, started
from tests.process import shapes
from tests.process.hosts import Sight, look
from tests.process.test_kill_matrix import (
    ESCAPES,
    GONE_SECONDS_MAX,
    LONG_LINGER_SECONDS,
    PATIENCE_SECONDS,
    ROLES,
    SHAPES,
    Tree,
    find_keeper,
    kill_each,
    planted,
    wait_until,
)
from tests.thorough import one_in, thorough

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet
    from tests.process.shapes import Leaves, Role

GRACE_SECONDS = 0.3
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP, "quit": signal.SIGQUIT}
ENDINGS = (
    *("exit", *SIGNALS, "timeout", "guard_sigkill", "keeper_sigkill"),
    *("hangup_of_pipe", "hangup_of_socket", "half_close_of_socket", "terminal_closed", "caller_sigkill", "far_end"),
)
# Endings after which the test, as the parent of the guard, gets its exit status.
REPORTED = ("exit", *SIGNALS, "timeout", "keeper_sigkill", "hangup_of_pipe", "hangup_of_socket", "half_close_of_socket")


@dataclass(frozen=True, slots=True)
class Cell:
    ending: str
    shape: str
    role: Role

    def __str__(self) -> str:
        return f"{self.ending}-{self.shape}-{self.role}"

    @property
    def leaves(self) -> Leaves:
        return "at_eof" if self.ending == "exit" else "never"

    @property
    def does_leader_go_at_once(self) -> bool:
        """A leader that daemonises has exited before its tree is up. So has `setsid` without its option to wait."""
        wrapped = self.shape in shapes.WRAPPERS and self.ending == "exit"
        return self.role == "leader" and (self.shape == "double_fork" or wrapped)

    def flags(self, patience: float) -> list[str]:
        linger = 0.05
        if self.does_leader_go_at_once:
            linger = patience if self.ending == "exit" else LONG_LINGER_SECONDS
        flags = ["--grace", str(GRACE_SECONDS), "--linger", str(linger)]
        if self.ending == "timeout":
            # A timeout is no longer counted after the exit of the command. The linger is.
            flags[-1] = str(patience) if self.does_leader_go_at_once else flags[-1]
            flags += ["--timeout", str(patience)]
        # Only the ending under test may end the tree.
        is_hangup = self.ending.startswith(("hangup", "half"))
        return [*flags, *(["--grace-after-eof", "0.1"] if is_hangup else ["--no-hangup"])]


# Cells that cannot exist, each with the reason.
IMPOSSIBLE = {
    "exit-stopped-leader": "a stopped process runs no instruction, so it cannot exit of its own accord",
    "exit-blocked_on_full_stdout-leader": "a process blocked in write() runs nothing either",
    **{
        f"terminal_closed-blocked_on_full_stdout-{role}": "the terminal holds no kilobytes, and closing it unblocks it"
        for role in ROLES
    },
    **{
        f"far_end-blocked_on_full_stdout-{role}": "the pipe ends with its reader, so nothing blocks on it any more"
        for role in ROLES
    },
    **{
        f"{ending}-double_fork-leader": "the command exits at once, and its exit is the ending"
        for ending in ("timeout", "hangup_of_pipe", "hangup_of_socket", "half_close_of_socket")
    },
}
PRODUCT = [Cell(*names) for names in itertools.product(ENDINGS, SHAPES, ROLES)]
RUN = [cell for cell in PRODUCT if str(cell) not in IMPOSSIBLE]
# The cells of `make test`.
FAST = {
    *("exit-double_fork-leader", "guard_sigkill-fork_loop-descendant", "keeper_sigkill-setsid-descendant"),
    *("hangup_of_pipe-stopped-leader", "half_close_of_socket-plain-leader", "terminal_closed-setsid-descendant"),
    "caller_sigkill-term_proof-descendant",
}


def marked(cell: Cell) -> ParameterSet:
    return pytest.param(cell, id=str(cell), marks=[] if str(cell) in FAST else thorough)


@dataclass(slots=True)
class Run:
    """A tree that is up under a guard."""

    # The process that the test has started: the guard or its caller.
    process: subprocess.Popen[bytes]
    guard: int
    keeper: Sight
    # The other end of stdin.
    stdin: socket.socket | int


def end_by_close(run: Run) -> None:
    if isinstance(run.stdin, socket.socket):
        run.stdin.close()
    else:
        os.close(run.stdin)
        run.stdin = -1


def end_by_half_close(run: Run) -> None:
    assert isinstance(run.stdin, socket.socket)
    run.stdin.shutdown(socket.SHUT_WR)


def end_by_signal(number: int) -> Callable[[Run], None]:
    return lambda run: os.kill(run.guard, number)


def end_by_keeper_sigkill(run: Run) -> None:
    assert run.keeper.is_there
    os.kill(run.keeper.pid, signal.SIGKILL)


def end_by_caller_sigkill(run: Run) -> None:
    assert run.process.pid != run.guard
    run.process.kill()


END: dict[str, Callable[[Run], None]] = {
    "exit": end_by_close,
    **{name: end_by_signal(number) for name, number in SIGNALS.items()},
    "timeout": lambda run: None,
    "guard_sigkill": end_by_signal(signal.SIGKILL),
    "keeper_sigkill": end_by_keeper_sigkill,
    "hangup_of_pipe": end_by_close,
    "hangup_of_socket": end_by_close,
    "half_close_of_socket": end_by_half_close,
    "terminal_closed": end_by_close,
    "caller_sigkill": end_by_caller_sigkill,
    "far_end": end_by_caller_sigkill,
}


@contextmanager
def stdin_of(ending: str) -> Generator[tuple[Any, socket.socket | int]]:
    """Yield both ends of the stdin of a guard: its own, and the test's."""
    if ending.endswith("of_socket"):
        ours, theirs = socket.socketpair()
        ours.send(b"unread")
        with ours, theirs:
            yield theirs, ours
        return
    if ending == "terminal_closed":
        write, read = os.openpty()
    else:
        read, write = os.pipe()
        if ending == "hangup_of_pipe":
            os.write(write, b"unread")
    run_stdin = write
    try:
        yield read, run_stdin
    finally:
        os.close(read)


async def check(
    cell: Cell, folder: Path, marker: str, patience: float, end: Callable[[Run], None] | None = None
) -> bool:
    """Run one cell. Return False if the tree was not up before a clock ended it.

    `end`: instead of the ending of the cell.
    """
    with ExitStack() as stack:
        tree = stack.enter_context(planted(folder, marker, cell.shape, cell.role, cell.leaves))
        theirs, ours = stack.enter_context(stdin_of(cell.ending))
        argv = guard(*cell.flags(patience), "--", *tree.argv)
        mode = {"caller_sigkill": "keeps", "far_end": "pipes", "terminal_closed": "terminal"}.get(cell.ending)
        if mode is not None:
            argv = [sys.executable, "-I", "-S", CALLER, mode, *argv]
        stdout = theirs if mode == "terminal" else subprocess.PIPE
        process = stack.enter_context(started(argv, stdin=theirs, stdout=stdout, stderr=subprocess.DEVNULL))
        # The guard, its keeper and its caller have the command line of the tree, with the marker, too.
        tree.size += 2 + (mode in ("keeps", "pipes"))
        if mode == "terminal" and cell.role == "leader" and cell.shape in shapes.WRAPPERS:
            tree.size -= 1  # In the group of the guard, setsid(1) need not fork.
        run = None
        try:
            guard_pid = process.pid
            if mode in ("keeps", "pipes"):
                assert process.stdout is not None
                guard_pid = int(process.stdout.readline())
            if not await is_up(tree, process):
                return False
            keeper = await keeper_above(tree.pid, process)
            if keeper is None:
                return False
            run = Run(process, guard_pid, keeper, ours)
            await end_and_count(cell, tree, run, end or END[cell.ending])
        finally:
            if isinstance(ours, int) and (run is None or run.stdin != -1):
                os.close(ours)
    return True


async def is_up(tree: Tree, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the tree is up. Return False if the guard has ended before that."""
    ended = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(tree.is_up(ended))
    while not waiting.done():
        await asyncio.wait([waiting], timeout=0.05)
        if process.poll() is not None and not ended.done():
            ended.set_result(None)
    return waiting.result()


async def keeper_above(pid: int, process: subprocess.Popen[bytes]) -> Sight | None:
    """Return the keeper of the tree; None if a timeout has ended the tree before the look."""
    looking = asyncio.create_task(find_keeper(pid))
    while not looking.done():
        await asyncio.wait([looking], timeout=0.05)
        if process.poll() is not None and not looking.done():
            looking.cancel()
            await asyncio.wait([looking])
            return None
    return looking.result()


async def end_and_count(cell: Cell, tree: Tree, run: Run, end: Callable[[Run], None]) -> None:
    if cell.ending in REPORTED:
        end(run)
        await wait_until(lambda: run.process.poll() is not None, "the guard does not exit")
        # "Over" must mean over: the count follows immediately.
        left = tree.left()
        assert left == []
        assert not run.keeper.is_there
        return
    seen = look(run.guard)
    assert seen is not None
    end(run)
    await wait_until(lambda: not tree.left(), "processes are left")
    for each in (seen, run.keeper):
        await wait_until(lambda each=each: not each.is_there, f"a guard is left: {each}")


@pytest.mark.parametrize("cell", [marked(cell) for cell in RUN])
async def test_guarded_tree_ends_completely(cell: Cell, tmp_path: Path, marker: str) -> None:
    try:
        for patience in PATIENCE_SECONDS:
            if await check(cell, tmp_path, marker, patience):
                return
            assert cell.ending == "timeout" or cell.does_leader_go_at_once, "it ended before it was up"
        pytest.fail("the tree was not up in time")
    except BaseException:
        await wait_until(lambda: not kill_each(marker), "the rest of a failed cell does not die")
        raise


def test_guard_matrix_names_every_impossible_cell() -> None:
    names = {str(cell) for cell in PRODUCT}
    assert IMPOSSIBLE.keys() <= names
    assert names >= FAST
    assert len(RUN) == 14 * 9 * 2 - len(IMPOSSIBLE)


def test_trees_outlive_the_wait_for_their_end() -> None:
    """Otherwise each cell passes, whatever the guard does."""
    assert shapes.LOOP_SECONDS_MAX > 1.5 * GONE_SECONDS_MAX
    assert shapes.LIFE_SECONDS_MAX > 1.5 * GONE_SECONDS_MAX


@thorough
@pytest.mark.parametrize("name", ["term-plain-leader", "guard_sigkill-fork_loop-descendant"])
async def test_cell_without_its_ending_fails(name: str, tmp_path: Path, marker: str) -> None:
    """The control of the matrix: the guard has nothing to react to, and the cell must see that."""
    [cell] = [cell for cell in RUN if str(cell) == name]
    with pytest.raises(AssertionError, match=r"the guard does not exit|processes are left"):
        await check(cell, tmp_path, marker, PATIENCE_SECONDS[0], end=lambda run: None)
    await wait_until(lambda: not kill_each(marker), "the control's rest does not die")


@pytest.mark.parametrize("shape", one_in(4, ESCAPES))
async def test_unguarded_tree_outlives_its_caller(shape: str, tmp_path: Path, marker: str) -> None:
    """The control: the same trees, the same death of the caller, and no guard."""
    try:
        with planted(tmp_path, marker, shape, "descendant", "never") as tree:
            argv = [sys.executable, "-I", "-S", CALLER, "pipes", *tree.argv]
            with started(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as caller:
                assert await tree.is_up()
                caller.kill()
                caller.wait()
                assert tree.left() != []
    finally:
        await wait_until(lambda: not kill_each(marker), "the control's rest does not die")
