"""Kill matrix: every ending × every shape of tree × the shape as leader or descendant leaves no process (G6).

Each cell starts a real tree (`shapes.py`), waits until it is up, and applies the ending. Then another process that
imports nothing of Banksman (`count.py`) counts the processes with the cell's marker in their argv from /proc. Where the
ending has a result, the count follows immediately: "over" must mean over. Where the host is dead, nothing reports the
end, and the count has one deadline. The guards (the keeper, and the zygote of a dead host) must end too.

The control at the end does the same to the same trees with `subprocess` and `killpg`, and must find some processes
left. Otherwise the zeros above would prove nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.process import hosts, other_user, shapes
from tests.process.helpers import NOBODY
from tests.process.hosts import Sight, look
from tests.thorough import one_in, thorough

import banksman
from banksman import Command, Ended, Finished, UsageError
from banksman.commands.running_command import State
from banksman.process import attributes, cgroups
from banksman.process.keeper.cgroup import prune
from banksman.process.zygote_client import spawner
from banksman.runtime.base_host import Host
from banksman.runtime.execute import default_host

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet
    from tests.process.shapes import Leaves, Role

HERE = Path(__file__).parent
GRACE_SECONDS = 0.3
HOLD_SECONDS = 0.3
LINGER_SECONDS = 0.05
# For a leader that exits immediately while its daemon stays: the ending under test must come before the end of the
# linger.
LONG_LINGER_SECONDS = 30.0
# One deadline for an ending, and one for a tree to start on a busy machine.
GONE_SECONDS_MAX = GRACE_SECONDS + 10.0
UP_SECONDS_MAX = 30.0
# Where the ending is a timer that starts with the tree, the tree must be up before it fires. On a busy machine it may
# not be. Such a run proves nothing, and is repeated with more patience.
PATIENCE_SECONDS = (0.4, 1.6, 6.4)

ENDINGS = (
    *("exit", "timeout", "idle_timeout", "cancel", "stop", "host_closed", "close_twice_at_once"),
    *("host_sigkill", "host_sigkill_with_forked_sibling", "keeper_sigkill", "zygote_sigkill", "interpreter_exit"),
    "handed_over_and_nobody_came",
)
SHAPES = (
    *("plain", "setsid", "double_fork", "env_i_setsid", "term_proof", "stopped", "fork_loop"),
    *("holds_stdout", "blocked_on_full_stdout"),
)
ROLES: tuple[Role, ...] = ("leader", "descendant")
# Shapes that a signal to the leader's group does not reach.
ESCAPES = ("setsid", "double_fork", "env_i_setsid", "fork_loop")


@dataclass(frozen=True, slots=True)
class Cell:
    ending: str
    shape: str
    role: Role
    # Whether the tree is in a control group of its own.
    is_grouped: bool = False
    # Whether the tree is of another user than the host.
    is_of_nobody: bool = False

    @property
    def user(self) -> int | None:
        return NOBODY if self.is_of_nobody else None

    @property
    def limits(self) -> dict[str, int] | None:
        return {"cgroup": 1} if self.is_grouped else None

    def __str__(self) -> str:
        return f"{self.ending}-{self.shape}-{self.role}"

    @property
    def does_leader_go_at_once(self) -> bool:
        """A leader that daemonises has exited before its tree is up. So has `setsid` without its option to wait."""
        wrapped = self.shape in shapes.WRAPPERS and self.ending == "exit"
        return self.role == "leader" and (self.shape == "double_fork" or wrapped)

    @property
    def is_ended_by_a_clock(self) -> bool:
        """Whether a time counted from the start of the tree ends it, and not an action of the test."""
        return self.ending in ("timeout", "idle_timeout") or (self.ending == "exit" and self.does_leader_go_at_once)

    @property
    def leaves(self) -> Leaves:
        return "at_eof" if self.ending == "exit" else "never"

    @property
    def variant(self) -> str:
        """Return the name of the shape in `shapes.py`."""
        # Blocked on the host's pipe it would not count as idle (see IMPOSSIBLE). Blocked on its leader's pipe it does.
        is_idle = self.ending == "idle_timeout" and self.shape == "blocked_on_full_stdout"
        return "blocked_on_its_leader" if is_idle else self.shape


# Cells that cannot exist, each with the reason.
IMPOSSIBLE = {
    "exit-stopped-leader": "a stopped process runs no instruction, so it cannot exit of its own accord",
    "exit-blocked_on_full_stdout-leader": "a process blocked in write() runs nothing either; if it goes on, it was not",
    "idle_timeout-blocked_on_full_stdout-leader": "its stdout is our pipe, which stays full only while the caller "
    "has paused the reading; then it is the caller who is idle, and the idle clock stands still",
    "handed_over_and_nobody_came-double_fork-leader": "the leader has exited: the host ends the rest of the tree, and "
    "refuses to hand it over",
}
PRODUCT = [Cell(*names) for names in itertools.product(ENDINGS, SHAPES, ROLES)]
RUN = [cell for cell in PRODUCT if str(cell) not in IMPOSSIBLE]


def marked(cell: Cell) -> ParameterSet:
    """Select the cells of `make test`: each ending meets a third of the shapes, and each shape a third of the endings.

    The roles alternate. `make prove` runs all the other cells.
    """
    place = ENDINGS.index(cell.ending) + SHAPES.index(cell.shape)
    is_first = place % len(ROLES) == ROLES.index(cell.role)
    has_other = str(Cell(cell.ending, cell.shape, _other(cell.role))) not in IMPOSSIBLE
    is_kept = place % 3 == 0 and (is_first or not has_other) and cell.ending != "handed_over_and_nobody_came"
    return pytest.param(cell, id=str(cell), marks=[] if is_kept else pytest.mark.thorough)


def some(*, is_grouped: bool = False, is_of_nobody: bool = False) -> list[Cell]:
    """Return a part of the cells: each ending meets a third of the shapes, each shape with both roles."""
    places = [(cell, ENDINGS.index(cell.ending) + SHAPES.index(cell.shape)) for cell in RUN]
    chosen = [cell for cell, place in places if place % 3 == 0 and place // 3 % 2 == ROLES.index(cell.role)]
    return [replace(cell, is_grouped=is_grouped, is_of_nobody=is_of_nobody) for cell in chosen]


def _other(role: Role) -> Role:
    return "descendant" if role == "leader" else "leader"


# -- a look at processes from outside --------------------------------------------------------------------------------
def count(marker: str) -> list[int]:
    command = [sys.executable, "-I", "-S", str(HERE / "count.py"), marker]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=UP_SECONDS_MAX)
    return [int(pid) for pid in done.stdout.split()]


async def wait_until(is_so: Callable[[], Any], what: str, seconds_max: float = GONE_SECONDS_MAX) -> None:
    """Poll until the condition holds. These processes are not children, and /proc sends no events."""
    deadline = time.monotonic() + seconds_max
    while not is_so():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def find_keeper(pid: int) -> Sight:
    """Return the keeper above a process of the tree.

    A process between them may exit during the look; then look again.
    """
    deadline = time.monotonic() + UP_SECONDS_MAX
    while time.monotonic() < deadline:
        sight = look(pid)
        while sight is not None and sight.name != "banksman-keeper":
            sight = look(sight.parent)
        if sight is not None:
            return sight
        await asyncio.sleep(0.005)
    raise AssertionError(f"there is no keeper above {pid}")


# -- a tree ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Tree:
    """One tree, and the fifo on which it reports that it is up. Each of its processes holds the fifo open."""

    argv: list[str]
    # A folder that its user can enter.
    folder: Path
    shape: str
    marker: str
    fifo: int
    # Smallest number of processes once it is up.
    size: int
    # The process with the shape, known once it is up.
    pid: int = 0

    async def is_up(self, ending: asyncio.Future[Finished] | None = None) -> bool:
        """Wait until the tree is up. Return False if the command has ended before that."""
        loop = asyncio.get_running_loop()
        said: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.fifo, lambda: said.done() or said.set_result(None))
        try:
            both = [said, *([ending] if ending else [])]
            await asyncio.wait(both, timeout=UP_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self.fifo)
        if not said.done():
            assert ending is not None, "the tree does not stand up"
            assert ending.done(), "the tree does not stand up"
            return False
        word = os.read(self.fifo, 64)
        if not word:
            return False  # All holders are gone, and none has written.
        self.pid = int(word)
        # The process reports before its last step, which is to stop or to block.
        state = {"stopped": "T", "blocked_on_full_stdout": "S", "blocked_on_its_leader": "S"}.get(self.shape)
        if state is not None:
            await wait_until(lambda: (sight := look(self.pid)) and sight.state == state, f"it is not in state {state}")
        # The count must see the whole tree now, or its later zero would mean nothing.
        standing = count(self.marker)
        return self.pid in standing and len(standing) >= self.size

    def left(self) -> list[int]:
        """Return the remaining processes, counted from outside; [0] if none is seen but the fifo is still held.

        A reader that lists pids and then looks at each misses a process that forks and exits without a pause. It finds
        none, and proves nothing.
        """
        seen = count(self.marker)
        return seen or [0] * self.is_held()

    def is_held(self) -> bool:
        try:
            return os.read(self.fifo, 64) != b""
        except BlockingIOError:
            return True


@contextmanager
def planted(
    folder: Path, marker: str, shape: str, role: Role, leaves: Leaves, *, user: int | None = None
) -> Generator[Tree]:
    path = folder / f"up-{time.monotonic_ns()}"
    os.mkfifo(path)
    path.chmod(0o666)
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # The leader and the process that it started, or the wrapper and the process that it waits for.
    has_two = role == "descendant" or (shape in shapes.WRAPPERS and leaves == "never")
    try:
        argv = shapes.argv(marker, shape, role, str(path), leaves)
        argv = argv if user is None else other_user.reachable(argv, folder)
        yield Tree(argv, folder, shape, marker, fifo, size=2 if has_two else 1)
    finally:
        os.close(fifo)


def is_placed(cell: Cell, tree: Tree) -> bool:
    """Whether the tree is in a control group and of another user, if it should be.

    A fork loop has no process that stays.
    """
    if cell.shape == "fork_loop":
        return True
    is_grouped = cgroups.usage(tree.pid) is not None
    uid = NOBODY if cell.is_of_nobody else os.geteuid()
    return is_grouped == cell.is_grouped and os.stat(f"/proc/{tree.pid}").st_uid == uid


# -- endings under a live host ---------------------------------------------------------------------------------------
@dataclass(slots=True)
class Run:
    """A tree that is up, under a host in this process."""

    host: Host
    command: Command
    # The wait for the end, of `execute` or of the command.
    ending: asyncio.Future[Finished]
    keeper: Sight


async def start(cell: Cell, tree: Tree, patience: float) -> tuple[Host, Command, asyncio.Future[Finished]]:
    linger = LINGER_SECONDS
    if cell.does_leader_go_at_once:
        # Longer than the timeout, if there is one: it fires while the daemon lingers.
        linger = {"exit": patience, "timeout": 2 * patience, "idle_timeout": 2 * patience}.get(
            cell.ending, LONG_LINGER_SECONDS
        )
    if cell.ending in ("timeout", "idle_timeout", "cancel"):
        timeout = patience if cell.ending == "timeout" else None
        idle_timeout = patience if cell.ending == "idle_timeout" else None
        ending = asyncio.ensure_future(
            banksman.execute(
                tree.argv,
                timeout=timeout,
                idle_timeout=idle_timeout,
                grace=GRACE_SECONDS,
                linger=linger,
                limits=cell.limits,
                user=cell.user,
                cwd=tree.folder,
            )
        )
        await asyncio.sleep(0)  # The task runs to its first wait, and then there is a command.
        host = default_host()
        [command] = [command for command in host.commands() if not command.is_over]
    else:
        host = Host()
        stdin = "pipe" if cell.ending == "exit" else None
        place: dict[str, Any] = {"limits": cell.limits, "user": cell.user, "cwd": tree.folder}
        started = await host.start(tree.argv, grace=GRACE_SECONDS, linger=linger, stdin=stdin, **place)
        assert isinstance(started, Command)
        command, ending = started, asyncio.ensure_future(started.wait())
    if cell.variant == "blocked_on_full_stdout":
        command.pause_reading()
    return host, command, ending


async def end_by_itself(run: Run) -> None:
    await run.command.close_stdin()


async def end_by_clock(run: Run) -> None:
    """Do nothing: the timer ends it."""


async def end_by_cancel(run: Run) -> None:
    assert isinstance(run.ending, asyncio.Task)
    run.ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.ending
    # The cancelled task is gone. The teardown does not belong to it, and the host lists its end.
    run.ending = asyncio.ensure_future(run.command.wait())


async def end_by_stop(run: Run) -> None:
    await run.command.stop()


async def end_by_close(run: Run) -> None:
    await run.host.close()
    assert run.command.is_over


async def end_by_two_closes(run: Run) -> None:
    """Neither call may return before the end: the second has the same promise."""
    await asyncio.gather(end_by_close(run), end_by_close(run))


async def end_by_keeper_sigkill(run: Run) -> None:
    assert run.keeper.is_there
    os.kill(run.keeper.pid, signal.SIGKILL)


async def end_after_zygote_sigkill(run: Run) -> None:
    """The keeper continues without its zygote, and the next command gets a new one."""
    zygote = look(run.keeper.parent)
    assert zygote is not None
    assert zygote.pid == spawner.current(attributes.take_inherited().fingerprint).pid
    os.kill(zygote.pid, signal.SIGKILL)
    await wait_until(lambda: not zygote.is_there, "the zygote is not dead")
    await run.command.stop()
    following = await banksman.execute([sys.executable, "-I", "-S", "-c", "print('still here')"])
    assert following.ended is Ended.EXITED
    assert following.code == 0
    assert spawner.current(attributes.take_inherited().fingerprint).pid != zygote.pid


END: dict[str, Callable[[Run], Awaitable[None]]] = {
    "exit": end_by_itself,
    "timeout": end_by_clock,
    "idle_timeout": end_by_clock,
    "cancel": end_by_cancel,
    "stop": end_by_stop,
    "host_closed": end_by_close,
    "close_twice_at_once": end_by_two_closes,
    "keeper_sigkill": end_by_keeper_sigkill,
    "zygote_sigkill": end_after_zygote_sigkill,
}
ENDED = {
    **{"exit": Ended.EXITED, "timeout": Ended.TIMEOUT, "idle_timeout": Ended.IDLE_TIMEOUT, "cancel": Ended.CANCELLED},
    **{"stop": Ended.STOPPED, "zygote_sigkill": Ended.STOPPED},
    **{"host_closed": Ended.HOST_CLOSED, "close_twice_at_once": Ended.HOST_CLOSED},
    # No caller asked for an end. The signal shows that the keeper was killed.
    "keeper_sigkill": Ended.EXITED,
}


async def check_under_a_living_host(cell: Cell, folder: Path, marker: str) -> None:
    for patience in PATIENCE_SECONDS:
        with planted(folder, marker, cell.variant, cell.role, cell.leaves, user=cell.user) as tree:
            host, command, ending = await start(cell, tree, patience)
            try:
                if await tree.is_up(ending):
                    assert is_placed(cell, tree)
                    await check_ending(cell, tree, Run(host, command, ending, await find_keeper(tree.pid)))
                    return
                assert cell.is_ended_by_a_clock, f"it ended before it stood: {ending}"
                await ending
            finally:
                # The host of `execute` lives as long as the loop.
                if host is not default_host():
                    await host.close()
    pytest.fail(f"the tree did not stand within {PATIENCE_SECONDS[-1]} s")


async def check_ending(cell: Cell, tree: Tree, run: Run) -> None:
    if cell.does_leader_go_at_once:
        # The daemon has seen its leader exit. The host must have seen it too, or the two would race below.
        await wait_until(lambda: run.command.state is not State.RUNNING, "the host does not know of the leader's exit")
    async with asyncio.timeout(GONE_SECONDS_MAX):
        await END[cell.ending](run)
        finished = await run.ending
    left = tree.left()
    assert left == []
    check_result(cell, tree, run.command, finished)
    # The keeper exits after its report, so it may still be on its way.
    await wait_until(lambda: not run.keeper.is_there, "the keeper is left")


def check_result(cell: Cell, tree: Tree, command: Command, finished: Finished) -> None:
    assert finished.survivors == ()
    assert finished.drained
    # A command that has exited is not timed out, stopped or closed, whatever happens during the linger.
    has_exited = cell.ending == "exit" or cell.does_leader_go_at_once
    assert finished.ended is (Ended.EXITED if has_exited else ENDED[cell.ending])
    assert finished.code == (0 if has_exited else None)
    is_killed = cell.ending == "keeper_sigkill" or (cell.shape == "term_proof" and cell.role == "leader")
    by = signal.SIGKILL if is_killed else signal.SIGTERM
    assert finished.signal == (None if has_exited else by)

    swept = {process.pid: process.command for process in finished.swept}
    assert command.pid not in swept
    # No process of others. One that was about to end at the look may have had no argv.
    assert [name for name in swept.values() if name and tree.marker not in name] == []
    is_alone = cell.role == "leader" and cell.shape not in ESCAPES
    # Processes in the leader's group get its TERM, and may be gone before a sweep.
    is_out_of_reach = cell.shape in (*ESCAPES, "term_proof") or cell.ending in ("exit", "keeper_sigkill")
    if is_alone:
        assert swept == {}
    elif cell.shape == "fork_loop":
        assert swept != {}
    elif is_out_of_reach:
        assert tree.pid in swept


# -- endings that kill the host --------------------------------------------------------------------------------------
async def check_with_a_host_that_dies(cell: Cell, folder: Path, marker: str) -> None:
    has_siblings = cell.ending == "host_sigkill_with_forked_sibling"
    errors = folder / "stderr"
    with planted(folder, marker, cell.variant, cell.role, cell.leaves, user=cell.user) as tree:
        order: hosts.Order = {
            "argv": tree.argv,
            "grace": GRACE_SECONDS,
            "linger": LONG_LINGER_SECONDS if cell.does_leader_go_at_once else LINGER_SECONDS,
            "is_reading_paused": cell.shape == "blocked_on_full_stdout",
            "has_siblings": has_siblings,
            "limits": cell.limits,
            "user": cell.user,
            "cwd": str(folder),
            "hold_seconds": HOLD_SECONDS if cell.ending == "handed_over_and_nobody_came" else 0,
        }
        with hosts.running(order, errors, UP_SECONDS_MAX) as (host, siblings):
            assert len(siblings) == (2 if has_siblings else 0)
            assert await tree.is_up()
            assert is_placed(cell, tree)
            keeper = await find_keeper(tree.pid)
            zygote = look(keeper.parent)
            assert zygote is not None
            assert zygote.name == "banksman-zygote"
            if cell.ending == "handed_over_and_nobody_came":
                hosts.let_end(host)
                # The interpreter does not wait for a command that it has handed over.
                assert host.wait(GONE_SECONDS_MAX) == 0
                assert errors.read_text() == ""
                await wait_until(lambda: not tree.left(), "processes are left")
            elif cell.ending == "interpreter_exit":
                hosts.let_end(host)
                assert host.wait(GONE_SECONDS_MAX) == 0
                # The interpreter waits for its commands at exit, so the test need not wait.
                left = tree.left()
                assert left == []
                assert errors.read_text() == ""
            else:
                host.kill()
                host.wait()
                await wait_until(lambda: not tree.left(), "processes are left")
            for guard in (keeper, zygote):
                await wait_until(lambda guard=guard: not guard.is_there, f"a guard is left: {guard}")
            assert all(sibling.is_there for sibling in siblings), "the siblings did not live on, so nothing was shown"
        for sibling in siblings:
            await wait_until(lambda sibling=sibling: not sibling.is_there, f"a sibling does not end: {sibling}")


# -- the matrix ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cell", [marked(cell) for cell in RUN])
async def test_tree_ends_completely_for_every_ending_and_shape(cell: Cell, tmp_path: Path, marker: str) -> None:
    await check_cell(cell, tmp_path, marker)


@pytest.mark.parametrize("cell", one_in(7, some(is_grouped=True)), ids=str)
async def test_tree_in_a_control_group_ends_completely(cell: Cell, tmp_path: Path, marker: str) -> None:
    why = cgroups.why_not(())
    if why is not None:
        with pytest.raises(UsageError, match="cannot set the limits cgroup"):
            await banksman.execute([sys.executable, "-c", "", marker], limits=cell.limits)
        assert count(marker) == []
        return
    await check_cell(cell, tmp_path, marker)
    # The group of a killed keeper.
    prune(cgroups.base_folder())


@thorough
@pytest.mark.skipif(other_user.why_not() != "", reason=other_user.why_not())
@pytest.mark.parametrize("cell", some(is_of_nobody=True), ids=str)
async def test_tree_of_another_user_ends_completely(cell: Cell, marker: str) -> None:
    with other_user.folder() as folder:
        await check_cell(cell, folder, marker)


async def check_cell(cell: Cell, tmp_path: Path, marker: str) -> None:
    check = check_under_a_living_host if cell.ending in END else check_with_a_host_that_dies
    try:
        await check(cell, tmp_path, marker)
    except BaseException:
        # The remains of a failed cell would be a load on the next cells, and make them fail too.
        await wait_until(lambda: not kill_each(marker), "the rest of a failed cell does not die")
        raise


def test_kill_matrix_cells_are_all_run_or_named_impossible() -> None:
    [parameters] = [mark.args[1] for mark in test_tree_ends_completely_for_every_ending_and_shape.pytestmark]  # pyright: ignore[reportFunctionMemberAccess]
    run = {parameter.id for parameter in parameters}
    assert len(run) == len(parameters)
    assert run.isdisjoint(IMPOSSIBLE)
    assert run | IMPOSSIBLE.keys() == {str(cell) for cell in PRODUCT}
    assert (len(ENDINGS), len(SHAPES), ROLES) == (13, 9, ("leader", "descendant"))


# -- the control -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "role"), one_in(3, itertools.product(SHAPES, ROLES)))
async def test_killpg_leaves_processes_outside_the_group(shape: str, role: Role, tmp_path: Path, marker: str) -> None:
    try:
        with (
            planted(tmp_path, marker, shape, role, "never") as tree,
            subprocess.Popen(
                tree.argv, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            ) as leader,
        ):
            try:
                assert await tree.is_up()
            finally:
                # The leader is an unreaped child of this process, so its pid and its group id cannot be reused.
                os.killpg(leader.pid, signal.SIGKILL)
                leader.wait()
            if shape not in ESCAPES:
                await wait_until(lambda: not tree.left(), "killpg has left even one of the leader's group")
            elif shape == "fork_loop":
                assert tree.is_held()
            else:
                assert tree.pid in tree.left()
    finally:
        await wait_until(lambda: not kill_each(marker), "the control's rest does not die")


def kill_each(marker: str) -> list[int]:
    """Kill the remaining processes, pid by pid, and return them."""
    left = count(marker)
    for pid in left:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # Open first, check second: if the process still has the marker, the pidfd is that of a marked process.
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            pass  # It has ended meanwhile.
        finally:
            os.close(fd)
    return left
