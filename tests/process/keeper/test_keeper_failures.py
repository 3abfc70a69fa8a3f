"""Failures of zygote and keeper: orders that cannot be delivered, and guards that are stopped, killed or late.

Each of these was a bug once. The guards are separate processes, so the tests disturb them by signals, by a fault plan,
or by a Python that changes something before it becomes the zygote.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import alive, child, run_program, start, wait_said, wait_until

from banksman import Ended, Host
from banksman.core.process_facts import BytesRead, Exited, KeeperActed, ProcessFact, Started, TreeEnded
from banksman.process import process as process_module
from banksman.process.keeper import messages
from banksman.process.keeper.keeper import KILLING, Keeper
from banksman.process.launch import prepare
from banksman.process.process import ChildProcess
from banksman.process.zygote_client import socketpair

SPARE = """
def spare_of(zygote):
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if parent_of(pid) == zygote and open(f"/proc/{pid}/comm").read() == "banksman-spare\\n":
                return pid
        except (OSError, IndexError):
            continue
    return 0
"""


def assert_said(done: subprocess.CompletedProcess[str], marker: str, expected: str) -> None:
    """Check the output, and that no process is left right after the exit."""
    left = alive(marker)
    assert done.stderr == ""
    assert (done.stdout, done.returncode) == (expected, 0)
    assert left == []


# -- orders and starts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ["ENOBUFS", "ETOOMANYREFS"])
def test_zygote_survives_an_order_the_spare_keeper_cannot_take(marker: str, number: str) -> None:
    """The kernel counts the fds of a command against its user while they are in flight.

    A zygote that dies of this error takes every running start with it. Instead, a newly forked keeper serves the
    command.
    """
    code = """
import errno
from banksman.process.zygote_client import spawner
spawner.plan_text = f"zygote:send_fds:1:{getattr(errno, WORDS[0])}:"
before = zygote_pid()
print([asyncio.run(banksman.execute(child(f"sys.exit({code})", MARKER))).code for code in (3, 4, 5)])
print(zygote_pid() == before, state_of(before) in "SR")
"""
    assert_said(run_program(code, marker, number), marker, "[3, 4, 5]\nTrue True\n")


@pytest.mark.parametrize("moment", ["pipe", "close", "posix_spawn"])
def test_fork_in_another_thread_during_a_start_holds_none_of_our_fds(marker: str, moment: str) -> None:
    """The fork comes at a bad moment of a start: an unregistered pipe, a close in progress, a zygote start.

    The forked process lives on. With a copy of a command's pipe, that pipe never ends. With a copy of the zygote's
    socket, the zygote never sees the death of the host. The fork has to wait for the end of the moment, and then the
    child closes its copies.
    """
    code = """
import fcntl, warnings
from banksman.process import syscalls as system
from banksman.process.zygote_client import spawner

warnings.simplefilter("ignore", DeprecationWarning)  # From 3.12 on, of a fork beside threads: it is what this is about.
held, hold = os.pipe()
has_come, pids, plain_lock, plain_call = threading.Event(), [], spawner.fork_lock, getattr(system, WORDS[0])

class Lock:
    def acquire(self):
        if not plain_lock.acquire(blocking=False):
            has_come.set()
            plain_lock.acquire()
    def release(self):
        plain_lock.release()
    def __enter__(self):
        plain_lock.acquire()
    def __exit__(self, *_):
        plain_lock.release()

def fork():
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        os.read(held, 1)
        os._exit(0)
    pids.append(pid)
    has_come.set()

def call(*arguments, **options):
    if WORDS[0] == "close":
        # The first that is for writing is the command's end of its output.
        if fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            let_fork_come()
        return plain_call(*arguments, **options)
    result = plain_call(*arguments, **options)
    let_fork_come()
    return result

def let_fork_come():
    if not forking.ident:
        forking.start()
        assert has_come.wait(20)

forking = threading.Thread(target=fork)
spawner.fork_lock = Lock()
setattr(system, WORDS[0], call)

async def main():
    async with banksman.Host() as host:
        command = await host.start(child("while hear(): pass\\nsay('end')", MARKER), stdin="pipe", drain=1, timeout=9)
        await asyncio.to_thread(forking.join)
        await command.close_stdin()
        done = await command.wait()
        print(done.ended, done.drained, done.stdout.text, end="")

asyncio.run(main())
print(banksman.shutdown())
os.close(hold)
print(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
"""
    assert_said(run_program(code, marker, moment), marker, "exited True end\nTrue\n0\n")


def test_shutdown_during_a_start_ends_the_command_as_host_closed(marker: str) -> None:
    """The orders wait in the queue of a stopped zygote.

    The caller of such a command gets `host_closed`, which is true, and not an error.
    """
    code = """
async def main():
    with frozen(zygote_pid()):
        starting = [asyncio.create_task(banksman.execute(child("stay()", MARKER))) for _ in range(3)]
        await asyncio.sleep(0)
        print(await asyncio.to_thread(banksman.shutdown))
        for done in await asyncio.gather(*starting):
            print(done.ended, done.code, done.survivors)

asyncio.run(main())
"""
    assert_said(run_program(code, marker), marker, "True\n" + "host_closed None ()\n" * 3)


# -- stopped guards --------------------------------------------------------------------------------------------------
def test_shutdown_does_not_wait_for_a_stopped_guard(marker: str) -> None:
    """A stopped spare keeper never sees its dismissal, and its zygote would wait for it forever."""
    code = (
        SPARE
        + """
asyncio.run(banksman.execute(child("", MARKER)))
zygote = zygote_pid()
wait_until(lambda: spare_of(zygote) != 0, "a spare keeper")
spare = spare_of(zygote)
with frozen(zygote), frozen(spare):
    print(banksman.shutdown(), state_of(zygote) == "", state_of(spare) == "")
"""
    )
    assert_said(run_program(code, marker), marker, "True True True\n")


# -- killed guards ---------------------------------------------------------------------------------------------------
def test_keeper_death_during_a_start_warns_that_the_command_may_have_run(marker: str) -> None:
    """The command may have run in part. Only the caller can know whether a second run does harm.

    The test covers both a certain failure right after the start, before the keeper has reported it, and a kill by the
    command itself.
    """
    code = """
from banksman.process.zygote_client import spawner

async def attempt(*argv):
    try:
        done = await banksman.execute(argv, timeout=20)
        return done.survivors == ()
    except banksman.MachineError as exc:
        return "may have run" in str(exc) and "check what it did before you try again" in exc.hint

async def main():
    for _ in range(10):
        assert await attempt("sh", "-c", "kill -9 $PPID; sleep 50", MARKER)
        assert alive(MARKER) == []
    assert banksman.shutdown()
    # What a keeper does right after its spawn fails.
    spawner.plan_text = "keeper:pidfd_open:1:12:"
    try:
        await banksman.execute(child("stay()", MARKER))
    except banksman.MachineError as exc:
        print(exc)
    assert alive(MARKER) == []

asyncio.run(main())
"""
    expected = "cannot start the command: its keeper died during the start; the command may have run"
    hint = "check what it did before you try again; none of its processes is left"
    assert_said(run_program(code, marker), marker, f"{expected} ({hint})\n")


def test_start_after_the_death_of_the_zygote_does_not_trust_its_socket(marker: str) -> None:
    """A new spare still has the socket of a zygote that was just killed, so the socket takes the order and loses it."""
    code = """
from banksman.process import attributes, syscalls
from banksman.process.zygote_client import spawner

plain = syscalls.socketpair

def held(*arguments):
    ends = plain(*arguments)
    # The role of the spare: a copy of the zygote's end. It is never read.
    os.dup(ends[1].fileno())
    return ends

async def main():
    syscalls.socketpair = held
    zygote = spawner.current(attributes.take_inherited().fingerprint)
    syscalls.socketpair = plain
    os.kill(zygote.pid, signal.SIGKILL)
    os.waitid(os.P_PID, zygote.pid, os.WEXITED | os.WNOWAIT)
    print((await banksman.execute(child("print('ran')", MARKER))).stdout.text, end="")

asyncio.run(main())
"""
    assert_said(run_program(code, marker), marker, "ran\n")


@pytest.mark.thorough
def test_zygote_gives_a_lost_keepers_tree_its_whole_time_despite_an_older_orphan(marker: str, tmp_path: Path) -> None:
    """The zygote has searched for the first tree's orphan until its time was up.

    The second tree must get its whole time: the zygote must end it and see its end, and must not report it as surviving
    in the moment of its discovery.

    The orphan belongs to another user, and the zygote is a root without CAP_KILL. Its five seconds are shortened to
    one.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable} -IS
import sys
sys.path.append(sys.argv[3].rsplit("/banksman/", 1)[0])
from banksman.process.keeper import lost_trees, zygote
lost_trees.SWEEP_SECONDS_MAX = 1.0
zygote.main(int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
""")
    python.chmod(0o700)
    code = """
import ctypes
argvs = [child('''
if fork() == 0:
    os.setresuid(65534, 65534, 65534)
    say("ready", os.getpid())
stay()
''', MARKER), child("for _ in range(30): fork() or stay()\\nsay('ready')\\nstay()", MARKER)]
sys.executable = WORDS[0]
PR_CAPBSET_DROP, CAP_KILL = 24, 5
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0) == 0

async def main():
    host = banksman.Host()
    first, second = [await host.start(argv, drain=0.1) for argv in argvs]
    orphan = int((await wait_said(first, "\\n")).split()[1])
    await wait_said(second, "ready")
    for command in (first, second):
        os.kill(parent_of(command.pid), signal.SIGKILL)
        done = await command.wait()
        print(done.signal, [survivor.pid == orphan for survivor in done.survivors])
    # We have what our zygote has not: it was taken from programs only that we start.
    os.kill(orphan, signal.SIGKILL)
    await host.close()

asyncio.run(main())
"""
    assert_said(run_program(code, marker, python), marker, "9 [True]\n9 [True]\n")


# -- late guards and late hosts --------------------------------------------------------------------------------------
async def test_sweep_of_many_is_reported_whole_to_a_host_that_reads_late(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred names do not fit into the socket, and the loop is blocked until all processes are dead.

    The final report comes after the names. If the keeper gave up on it, the host would have to report every process as
    a survivor.
    """

    def narrow() -> tuple[Any, Any]:
        ours, theirs = socketpair()
        # Room for two of the messages at most. With the default buffer the test would need a thousand processes.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        return ours, theirs

    monkeypatch.setattr(process_module, "socketpair", narrow)
    code = """
for _ in range(300):
    if fork() == 0:
        os.setsid()
        stay()
say("ready")
stay()
"""
    async with Host() as host:
        command = await start(host, child(code, marker), grace=0.5)
        await wait_said(command, "ready")
        command.stop_nowait(at_once=True)
        wait_until(lambda: alive(marker) == [], "the end of the tree, with the loop blocked all the while")
        done = await command.wait()
    assert (done.ended, done.signal, done.survivors) == (Ended.STOPPED, signal.SIGKILL, ())
    assert len({swept.pid for swept in done.swept}) == 300


@pytest.mark.parametrize("word", [messages.TERM, messages.REST])
def test_keeper_ignores_a_rung_that_comes_after_the_kill(word: str) -> None:
    """A late host sends TERM when the keeper already kills.

    CONT goes with TERM, so frozen processes would run again and could escape. In a real run that moment is too short to
    hit.
    """
    keeper, said = _bare_keeper()
    keeper._phase = KILLING  # pyright: ignore[reportPrivateUsage]
    keeper._obey((word, 5.0), [])  # pyright: ignore[reportPrivateUsage]
    assert said == []
    assert keeper._deadline is None  # pyright: ignore[reportPrivateUsage]


def test_keeper_obeys_a_rung_before_the_kill() -> None:
    """Without this, the test above could pass because the keeper never reacts."""
    keeper, said = _bare_keeper()
    keeper._obey((messages.TERM, 5.0), [])  # pyright: ignore[reportPrivateUsage]
    assert said == [signal.SIGTERM, signal.SIGCONT]


def _bare_keeper() -> tuple[Keeper, list[int]]:
    """Return a keeper without a tree, and the list of signals that it would have sent."""
    said: list[int] = []

    class Bare(Keeper):
        _phase = "running"
        _deadline = None
        _is_empty = False
        _has_terminal = False
        _look_again_at = None

        def __init__(self) -> None:
            self._sweep: Any = self
            self._leader: Any = self

        def term(self) -> None:
            said.append(signal.SIGTERM)

        def signal(self, number: int, to_group: bool) -> None:
            said.append(number)

        def _reap(self) -> None:
            pass

        def _report_names(self) -> None:
            pass

    return Bare(), said


class Facts:
    """Queue of the facts of a process."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ProcessFact] = asyncio.Queue()

    def __call__(self, fact: ProcessFact) -> None:
        self._queue.put_nowait(fact)

    async def wait(self, kind: type[Any], is_meant: Callable[[Any], bool] = lambda _fact: True) -> Any:
        """Return the next fact of this kind. Fail if the keeper has acted before it."""
        while not (isinstance(fact := await self._queue.get(), kind) and is_meant(fact)):
            assert not isinstance(fact, KeeperActed | Exited | TreeEnded), fact
        return fact


async def test_keeper_acts_on_a_deadline_that_is_not_renewed(marker: str) -> None:
    """The keeper ends a command whose host falls silent. A live host renews the deadline in time."""
    facts = Facts()
    code = "time.sleep(2); say('past'); stay()"
    process = ChildProcess(prepare(child(code, marker)), stdin="null", grace=5, linger=0, deadline=1.0, on_fact=facts)
    try:
        await facts.wait(Started)
        process.renew(30.0)
        await facts.wait(BytesRead, lambda fact: b"past" in fact.data)
        process.renew(0.1)
        assert (await facts.wait(KeeperActed)).rung == "term"
        assert (await facts.wait(Exited)).signal == signal.SIGTERM
        assert (await facts.wait(TreeEnded)).survivors == ()
    finally:
        process.close()
