"""A running tree moves from one host to another: nothing is lost, one host has it, and no tree is left without one.

The old host is a program of its own where its death matters. Elsewhere both hosts are in the process of the test: they
share nothing but the keeper.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import (
    Heard,
    alive,
    as_nobody,
    child,
    frozen_guards,
    parent_of,
    run_program,
    running_program,
    start,
    state_of,
    wait_none,
    wait_said,
    wait_until,
)
from tests.process.test_kill_matrix import wait_until as wait_in_loop

from banksman import Command, Ended, Host
from banksman.commands.options import Options
from banksman.commands.running_command import State
from banksman.core.process_facts import ProcessFact, SweepEnded
from banksman.errors import BanksmanError, MachineError, NotFound, Refused, UsageError
from banksman.folders import held_folder
from banksman.process import adoption, syscalls, tree_hand_over
from banksman.process.adoption import Claimed, claim
from banksman.process.keeper import hold, keeper, messages, zygote
from banksman.process.keeper.lease_timer import LeaseTimer
from banksman.process.launch import prepare
from banksman.process.lease_page import LeasePage
from banksman.process.process import ChildProcess
from banksman.process.zygote_client import spawner

SECRET = bytes(range(32))
# Longer than any test: a hold that ends by its time would hide a missing claim.
LONG_SECONDS = 100.0
SHORT_SECONDS = 0.3
LINES = 40_000
STREAM = f"""
for number in range({LINES}):
    say(number)
say("heard", hear())
os._exit(3)
"""
ECHO = """
say("ready")
while line := hear():
    say("heard", line)
os._exit(3)
"""
# A leader and a process outside of its session. Both ignore TERM.
STUBBORN = """
be_deaf()
if not fork():
    os.setsid()
    say("ready")
    stay()
stay()
"""
# A leader that notes a TERM, and exits.
POLITE = """
def go(*_):
    touch(PATH)
    os._exit(0)
signal.signal(signal.SIGTERM, go)
say("ready")
stay()
"""
# The old host: it starts the child, hands it over after `WORDS[1]` bytes, and exits.
OLD_HOST = """

import banksman
from banksman.process.zygote_client import spawner

async def main():
    code, enough, seconds, path = WORDS
    heard, told = bytearray(), asyncio.Event()
    def on_output(_stream, data):
        heard.extend(data)
        if len(heard) >= int(enough):
            told.set()
    host = banksman.Host()
    command = await start(host, child(code, MARKER), stdin="pipe", on_output=on_output, grace=0.2)
    await told.wait()
    handed = command.hand_over_nowait(float(seconds), bytes(range(32)))
    with open(path, "wb") as file:
        file.write(heard)
    name = await handed
    print(name, command.pid, banksman.shutdown(), flush=True)

asyncio.new_event_loop().run_until_complete(main())
"""


def adopt(claimed: Claimed, **options: Any) -> Command:
    return Command(claimed, Options(stdin="pipe", **options), id="adopted", on_end=lambda _: None)


async def take(name: str, secret: bytes = SECRET, lease: LeasePage | None = None) -> Claimed:
    return await claim(name, secret, argv=(b"adopted",), lease=lease)


async def hand(command: Command, seconds: float = LONG_SECONDS) -> str:
    return await command.hand_over_nowait(seconds, SECRET)


async def held(host: Host, argv: list[str], seconds: float = LONG_SECONDS) -> tuple[str, int]:
    """Start a child that says "ready", and hand it over. Return the name, and the pid of the child."""
    command = await start(host, argv, stdin="pipe", grace=0.2, linger=0.1)
    await wait_said(command, "ready")
    assert command.pid is not None
    return await hand(command, seconds), command.pid


def handed_over_by_a_program(code: str, marker: str, path: Path, enough: int, seconds: float) -> tuple[str, int]:
    """Let a program start the child, hand it over and exit. Return the name, and the pid of the child."""
    done = run_program(OLD_HOST, marker, code, enough, seconds, path)
    assert done.returncode == 0, done.stderr
    name, pid, is_over = done.stdout.split()
    # The program is done with its processes, although a zygote and a tree go on.
    assert is_over == "True"
    assert done.stderr == ""
    return name, int(pid)


def wait_holds(command: Command) -> None:
    """Wait until the keeper holds the tree. The loop does not run meanwhile, so the answer stays unread."""
    fds = f"/proc/{command.keeper_pid}/fd"
    wait_until(lambda: len(os.listdir(fds)) > 10, "the keeper to have the fds")


def sockets_left() -> list[str]:
    return os.listdir(held_folder())


async def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of the test."""
    await asyncio.to_thread(wait_until, lambda: state_of(pid) in ("", "Z", "X"), f"the end of {pid}")


# -- nothing is lost -------------------------------------------------------------------------------------------------
async def test_hand_over_gives_each_byte_to_exactly_one_host(marker: str, tmp_path: Path) -> None:
    path = tmp_path / "heard"
    name, pid = handed_over_by_a_program(STREAM, marker, path, 100_000, LONG_SECONDS)
    claimed = await take(name)
    assert claimed.pid == pid
    heard = Heard()
    command = adopt(claimed, on_output=heard)
    assert sockets_left() == []
    await heard.wait(f"{LINES - 1}\n")
    await command.write(b"the successor\n")
    done = await command.wait()
    assert (done.ended, done.code, done.drained) == (Ended.EXITED, 3, True)
    old = path.read_text()
    assert len(old) >= 100_000
    assert heard.text
    lines = "".join(f"{number}\n" for number in range(LINES))
    assert old + heard.text == f"{lines}heard the successor\n"
    await asyncio.to_thread(wait_none, marker)


async def test_hand_over_can_be_repeated(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe")
        await wait_said(command, "ready")
        for number in range(8):
            name = await hand(command)
            with pytest.raises(Refused, match="was handed over"):
                await command.wait()
            command = adopt(await take(name))
            await command.write(f"{number}\n".encode())
            await wait_said(command, f"heard {number}")
        await command.close_stdin()
        assert (await command.wait()).code == 3


async def test_exit_while_held_keeps_output_status_and_sweeps_the_rest(marker: str) -> None:
    code = """
if not fork():
    os.setsid()
    be_deaf()
    os.close(1)
    os.close(2)
    stay()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
say("ready")
signal.sigwait({signal.SIGUSR1})
say("x" * 30_000)
say("last words", to=2)
os._exit(5)
"""
    async with Host() as host:
        name, pid = await held(host, child(code, marker))
        os.kill(pid, signal.SIGUSR1)
        # Nothing of the tree is left, and its output is still there.
        await asyncio.to_thread(wait_none, marker)
        await wait_gone(pid)
        command = adopt(await take(name))
        done = await command.wait()
        assert (done.ended, done.code, done.drained, done.survivors) == (Ended.EXITED, 5, True, ())
        assert done.stdout.text == "x" * 30_000 + "\n"
        assert done.stderr.text == "last words\n"
        assert len(done.swept) == 1
        assert sockets_left() == []


async def test_exit_before_the_answer_is_reported_to_the_successor(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe")
        await wait_said(command, "ready")
        assert command.pid is not None
        with frozen_guards(command.pid):
            os.kill(command.pid, signal.SIGKILL)
            handed = command.hand_over_nowait(LONG_SECONDS, SECRET)
        wait_holds(command)
        # A timer of the old host may look at this moment. The exit is not for it.
        command.look_now()
        done = await adopt(await take(await handed)).wait()
        assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGKILL)


async def test_stream_that_has_ended_before_is_ended_for_the_successor(marker: str) -> None:
    code = "say('ready')\nos.close(1)\nsay('more', to=2)\nhear()\nos._exit(0)"
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe")
        await wait_said(command, "more", stream="stderr")
        while not (await command.read(after=6)).is_end:
            pass
        command = adopt(await take(await hand(command)))
        assert (await command.read()).is_end
        await command.close_stdin()
        done = await command.wait()
        assert (done.code, done.drained) == (0, True)


async def test_terminal_is_handed_over(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), pty=(30, 90))
        await wait_said(command, "ready")
        claimed = await take(await hand(command))
        taken = Command(claimed, Options(pty=(30, 90)), id="adopted", on_end=lambda _: None)
        await taken.write(b"typed\n")
        await wait_said(taken, "heard typed")
        await taken.resize(40, 100)
        await taken.close_stdin()
        assert (await taken.wait()).code == 3


# -- the successor is the host ---------------------------------------------------------------------------------------
async def test_successor_stops_the_tree_by_the_ladder(marker: str) -> None:
    async with Host() as host:
        name, pid = await held(host, child(STUBBORN, marker))
        claimed = await take(name)
        keeper = claimed.keeper_pid
        command = adopt(claimed, grace=0.2)
        assert command.pid == pid
        done = await command.stop()
        assert [step.rung for step in done.ladder] == ["term", "kill"]
        assert (done.ended, done.signal, done.survivors) == (Ended.STOPPED, signal.SIGKILL, ())
        assert len(done.swept) == 1
        assert alive(marker) == []
        await wait_gone(keeper)


async def test_timeout_counts_from_the_start_of_the_child(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        claimed = await take(name)
        age = time.monotonic() - claimed.started_at
        done = await adopt(claimed, timeout=0.01, grace=0.2).wait()
        assert done.ended is Ended.TIMEOUT
        assert done.ladder[0].at >= age


async def test_successor_sweeps_the_processes_of_a_turn(marker: str) -> None:
    code = "say('ready')\nhear()\nif not fork(): stay()\nsay('forked')\nhear()\nos._exit(0)"
    facts: list[ProcessFact] = []
    ended = asyncio.Event()

    def on_fact(fact: ProcessFact) -> None:
        facts.append(fact)
        if isinstance(fact, SweepEnded):
            ended.set()

    async with Host() as host:
        name, _pid = await held(host, child(code, marker))
        command = Command(
            await take(name),
            Options(stdin="pipe"),
            id="adopted",
            on_end=lambda _: None,
            on_fact=on_fact,
        )
        since = asyncio.get_running_loop().time()
        command.note_time()
        await command.write(b"fork\n")
        await wait_said(command, "forked")
        command.sweep_nowait(since, ends=True)
        await asyncio.wait_for(ended.wait(), 60)
        [swept] = [fact for fact in facts if isinstance(fact, SweepEnded)]
        assert len(swept.swept) == 1
        assert alive(marker) == [command.pid]
        await command.write(b"exit\n")
        assert (await command.wait()).code == 0


async def test_successor_can_have_the_zygote_kill_the_keeper(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(STUBBORN, marker))
        command = adopt(await take(name))
        command._process.kill_keeper()  # pyright: ignore[reportPrivateUsage]
        done = await command.wait()
        assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGKILL)
        assert alive(marker) == []


SUCCESSOR = """
from banksman.commands.options import Options
from banksman.process.adoption import claim

async def main():
    claimed = await claim(WORDS[0], bytes(range(32)), argv=(b"adopted",))
    command = banksman.Command(claimed, Options(stdin="pipe", grace=0.2), id="a", on_end=lambda _: None)
    if WORDS[1] == "sibling":
        # A fork that Python does not see. It keeps copies of every fd.
        import ctypes
        if ctypes.PyDLL(None).fork() == 0:
            signal.alarm(60)
            os.read(0, 1)
            os._exit(0)
    if WORDS[1] == "shutdown":
        print(banksman.shutdown(), len(alive(MARKER)), flush=True)
    if WORDS[1] == "hand over":
        print(await command.hand_over_nowait(100, bytes(range(32))), banksman.shutdown(), flush=True)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["plain", pytest.param("sibling", marks=pytest.mark.thorough)])
async def test_death_of_the_successor_ends_the_tree(how: str, tmp_path: Path, marker: str) -> None:
    termed = tmp_path / "termed"
    code = POLITE.replace("PATH", repr(str(termed)))
    name, pid = handed_over_by_a_program(code, marker, tmp_path / "heard", 1, LONG_SECONDS)
    keeper = parent_of(pid)
    guardian = parent_of(keeper)
    with running_program(SUCCESSOR, f"other-{marker[7:]}", name, how) as successor:
        assert successor.stdout is not None
        assert successor.stdout.readline() == "up\n"
        assert len(alive(marker)) == 1
        successor.kill()
        successor.wait()
        await asyncio.to_thread(wait_none, marker)
        # By the ladder of the keeper. The zygote would kill, much later.
        assert termed.exists()
        for guard in (keeper, guardian):
            await wait_gone(guard)


@pytest.mark.thorough
async def test_shutdown_of_the_successor_waits_for_the_tree(tmp_path: Path, marker: str) -> None:
    name, _pid = handed_over_by_a_program(STUBBORN, marker, tmp_path / "heard", 1, LONG_SECONDS)
    with running_program(SUCCESSOR, f"other-{marker[7:]}", name, "shutdown") as successor:
        assert successor.stdout is not None
        # It looks for the marker of another test, so the tree is counted here.
        assert successor.stdout.readline().startswith("True")
        assert alive(marker) == []


async def test_shutdown_of_the_successor_does_not_wait_for_a_tree_that_it_has_handed_over(
    tmp_path: Path, marker: str
) -> None:
    code = POLITE.replace("PATH", repr(str(tmp_path / "termed")))
    name, pid = handed_over_by_a_program(code, marker, tmp_path / "heard", 1, LONG_SECONDS)
    with running_program(SUCCESSOR, f"other-{marker[7:]}", name, "hand over") as successor:
        assert successor.stdout is not None
        name, is_over = successor.stdout.readline().split()
        assert is_over == "True"
    assert alive(marker) == [pid]
    done = await adopt(await take(name)).stop(at_once=True)
    assert done.survivors == ()


@pytest.mark.thorough
async def test_lease_of_the_successor_replaces_that_of_the_old_host(marker: str) -> None:
    def page(seconds: float) -> LeasePage:
        return LeasePage(time.monotonic() + seconds, time.monotonic() + 3 * seconds)

    launch, new = prepare(child(ECHO, marker)), page(LONG_SECONDS)
    for seconds in (1.0, 4.0, 16.0):
        old = page(seconds)
        first = Command(launch, Options(stdin="pipe"), id="first", on_end=lambda _: None, lease=old)
        try:
            await wait_said(first, "ready")
            command = adopt(await take(await hand(first), lease=new))
            break
        except (BanksmanError, AssertionError):
            # The machine is slow, and the old lease ended before the claim.
            await first.wait()
            old.close()
    else:
        pytest.fail("the old lease always ended before the claim")
    await asyncio.sleep(3.2 * seconds)
    await command.write(b"still here\n")
    await wait_said(command, "heard still here")
    await command.close_stdin()
    assert (await command.wait()).code == 3
    old.close()
    new.close()


# -- nobody comes, or the guards die ---------------------------------------------------------------------------------
@pytest.mark.thorough
async def test_tree_ends_when_nobody_comes(tmp_path: Path, marker: str) -> None:
    name, pid = handed_over_by_a_program(STUBBORN, marker, tmp_path / "heard", 1, SHORT_SECONDS)
    await asyncio.to_thread(wait_none, marker)
    await wait_gone(pid)
    assert sockets_left() == []
    with pytest.raises(NotFound, match="no process waits there"):
        await take(name)


async def test_tree_ends_when_nobody_comes_and_the_old_host_lives(marker: str) -> None:
    async with Host() as host:
        _name, pid = await held(host, child(STUBBORN, marker), SHORT_SECONDS)
        await asyncio.to_thread(wait_none, marker)
        await wait_gone(pid)
        assert sockets_left() == []


async def test_tree_ends_in_time_when_the_socket_file_of_its_hold_was_removed(marker: str) -> None:
    async with Host() as host:
        began = time.monotonic()
        name, pid = await held(host, child(STUBBORN, marker), SHORT_SECONDS)
        (held_folder() / name).unlink()
        with pytest.raises(NotFound, match="no process waits there"):
            await take(name)
        await asyncio.to_thread(wait_none, marker)
        await wait_gone(pid)
        assert time.monotonic() - began >= SHORT_SECONDS


# A host that dies right after the answer, while its zygote has not run since the request.
HASTY_HOST = """
async def main():
    command = await start(banksman.Host(), child(WORDS[0], MARKER), stdin="pipe", grace=0.2)
    await wait_said(command, "ready")
    with frozen(parent_of(parent_of(command.pid))):
        print(await command.hand_over_nowait(float(WORDS[1]), bytes(range(32))), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.thorough
async def test_guards_leave_a_tree_alone_long_after_its_old_host_has_gone(tmp_path: Path, marker: str) -> None:
    """The zygote bounds the keepers of a dead host. A tree with another host, or one that is held, is none of those.

    One host exits, the other one is killed, both at the same time, because the test mostly waits.
    """
    bound = zygote.DUTY_SECONDS_MAX + 2.0

    def exited() -> str:
        return handed_over_by_a_program(ECHO, marker, tmp_path / "heard", 1, bound + 5.0)[0]

    def killed() -> str:
        return run_program(HASTY_HOST, marker, ECHO, bound + 5.0).stdout.strip()

    async def is_left_alone(old_host: Callable[[], str]) -> None:
        name = await asyncio.to_thread(old_host)
        await asyncio.sleep(bound)
        command = adopt(await take(name))
        # Beyond the end of the hold too, and of the time that a keeper has after that.
        await asyncio.sleep(bound + 5.0)
        await command.write(b"one\n")
        await wait_said(command, "heard one")
        await command.close_stdin()
        assert (await command.wait()).code == 3

    await asyncio.gather(is_left_alone(exited), is_left_alone(killed))


@pytest.mark.thorough
async def test_tree_ends_when_its_keeper_is_killed_while_it_holds(tmp_path: Path, marker: str) -> None:
    name, pid = handed_over_by_a_program(STUBBORN, marker, tmp_path / "heard", 1, LONG_SECONDS)
    keeper = parent_of(pid)
    guardian = parent_of(keeper)
    os.kill(keeper, signal.SIGKILL)
    await asyncio.to_thread(wait_none, marker)
    await wait_gone(guardian)
    with pytest.raises(NotFound, match="no process waits there"):
        await take(name)
    # The socket of a killed keeper stays behind, until the next hand-over of this user.
    assert sockets_left() == [name]
    async with Host() as host:
        following, _pid = await held(host, child(ECHO, marker))
        assert sockets_left() == [following]
        (await take(following)).close()
        await asyncio.to_thread(wait_none, marker)


@pytest.mark.thorough
async def test_tree_is_taken_over_after_its_zygote_was_killed(tmp_path: Path, marker: str) -> None:
    name, pid = handed_over_by_a_program(STUBBORN, marker, tmp_path / "heard", 1, LONG_SECONDS)
    guardian = parent_of(parent_of(pid))
    os.kill(guardian, signal.SIGKILL)
    await wait_gone(guardian)
    command = adopt(await take(name), grace=0.1)
    assert guardian not in spawner.pids()
    done = await command.stop()
    assert (done.ended, done.survivors) == (Ended.STOPPED, ())
    assert alive(marker) == []


async def test_tree_ends_when_the_claimed_process_is_given_up(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(STUBBORN, marker))
        (await take(name)).close()
        await asyncio.to_thread(wait_none, marker)


# -- only the right one ----------------------------------------------------------------------------------------------
async def test_one_of_two_successors_wins(marker: str) -> None:
    async with Host() as host:
        name, pid = await held(host, child(ECHO, marker))
        with frozen_guards(pid):
            claims = [asyncio.ensure_future(take(name)) for _ in range(2)]
            # Both have sent their claims before the keeper runs again.
            for _ in range(10):
                await asyncio.sleep(0)
        results = await asyncio.gather(*claims, return_exceptions=True)
        [won] = [result for result in results if isinstance(result, Claimed)]
        [lost] = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(lost, Refused)
        assert "another host was first" in str(lost)
        with pytest.raises(NotFound):
            await take(name)
        command = adopt(won)
        await command.write(b"one\n")
        await wait_said(command, "heard one")
        await command.stop()


def connect(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(60)
    peer.connect(str(held_folder() / name))
    return peer


@pytest.mark.parametrize(
    ("message", "has_pidfd", "why"),
    [
        (b"claim ", True, b"secret"),
        (b"claim " + SECRET[:-1], True, b"secret"),
        (b"claim " + SECRET + b" ", True, b"secret"),
        (b"claim " + SECRET, False, b"message"),
        (b"other " + SECRET, True, b"message"),
    ],
    ids=["empty", "cut", "longer", "no pidfd", "other verb"],
)
async def test_wrong_claim_is_refused_and_the_hold_continues(
    message: bytes, has_pidfd: bool, why: bytes, marker: str
) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        pidfd = os.pidfd_open(os.getpid())
        with connect(name) as peer:
            socket.send_fds(peer, [messages.WIRE + b" " + message], [pidfd] if has_pidfd else [])
            assert await asyncio.to_thread(peer.recv, 4096) == messages.WIRE + b" no " + why
            assert await asyncio.to_thread(peer.recv, 4096) == b""
        os.close(pidfd)
        await adopt(await take(name)).stop()


@pytest.mark.parametrize(
    "message",
    [b"", b"\0" * 60_000, b"GET / HTTP/1.1", b"banksman-keeper-99 claim " + SECRET],
    ids=["empty", "zeros", "http", "later version"],
)
async def test_other_version_and_garbage_are_refused_with_the_version_of_the_keeper(
    message: bytes, marker: str
) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        with connect(name) as peer:
            peer.send(message)
            assert await asyncio.to_thread(peer.recv, 4096) == messages.WIRE + b" no version"
        await adopt(await take(name)).stop()


async def test_claim_names_both_versions_when_they_differ(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        with monkeypatch.context() as patched:
            patched.setattr(messages, "WIRE", b"banksman-keeper-0")
            with pytest.raises(Refused, match=r"its keeper speaks banksman-keeper-3, this host banksman-keeper-0"):
                await take(name)
        await adopt(await take(name)).stop()


async def test_claim_with_a_wrong_secret_says_so(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        with pytest.raises(Refused, match="the secret is wrong"):
            await take(name, bytes(32))
        await adopt(await take(name)).stop()


async def test_many_silent_clients_do_not_keep_the_successor_out(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        silent = [connect(name) for _ in range(3 * hold.CLIENTS_MAX)]
        await adopt(await take(name)).stop()
        for peer in silent:
            # Each of them has got an answer.
            assert (await asyncio.to_thread(peer.recv, 4096)).startswith(messages.WIRE + b" no ")
            peer.close()


async def test_successor_is_served_before_the_time_of_silent_clients_is_over(marker: str) -> None:
    async def answers_of_silent_clients() -> set[bytes]:
        name, _pid = await held(host, child(ECHO, marker))
        silent = [connect(name) for _ in range(3)]
        await adopt(await take(name)).stop()
        answers = {await asyncio.to_thread(peer.recv, 4096) for peer in silent}
        for peer in silent:
            peer.close()
        return answers

    async with Host() as host:
        # They are told that another one has it, and not that they were too slow. A busy machine may need several
        # attempts.
        attempts = [await answers_of_silent_clients() for _ in range(3)]
        assert {messages.WIRE + b" no taken"} in attempts


async def test_silent_client_does_not_extend_the_hold(marker: str) -> None:
    async with Host() as host:
        name, pid = await held(host, child(STUBBORN, marker), SHORT_SECONDS)
        keeper = parent_of(pid)
        with connect(name):
            await asyncio.to_thread(wait_none, marker)
        await wait_gone(keeper)
        # The keeper has done it, and not the zygote in its place.
        assert sockets_left() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_other_user_is_refused(marker: str) -> None:
    code = (
        "import socket, sys\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "peer.connect(sys.argv[1])\n"
        "print(peer.recv(4096).decode())\n"
    )
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        # With the right to pass any folder, so that only the check of the uid is left.
        argv = as_nobody([sys.executable, "-c", code, str(held_folder() / name)])
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == f"{messages.WIRE.decode()} no user\n", done.stderr
        await adopt(await take(name)).stop()


async def test_socket_and_its_folder_belong_to_the_user_alone(marker: str) -> None:
    async with Host() as host:
        name, _pid = await held(host, child(ECHO, marker))
        assert held_folder().stat().st_mode & 0o777 == 0o700
        assert (held_folder() / name).stat().st_mode & 0o777 == 0o600
        await adopt(await take(name)).stop()


# -- a hand-over that does not happen --------------------------------------------------------------------------------
async def test_host_keeps_the_child_when_the_keeper_does_not_answer(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_hand_over, "ANSWER_SECONDS_MAX", 0.1)
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe")
        await wait_said(command, "ready")
        assert command.pid is not None
        with frozen_guards(command.pid):
            with pytest.raises(MachineError, match="does not answer in time"):
                await hand(command, SHORT_SECONDS)
            assert sockets_left() == []
        await command.write(b"one\n")
        await wait_said(command, "heard one")
        monkeypatch.undo()
        # The next attempt succeeds.
        command = adopt(await take(await hand(command)))
        await command.close_stdin()
        assert (await command.wait()).code == 3


def give_up(command: Command) -> None:
    """Let the host stop waiting for the answer, as after its time."""
    process = command._process  # pyright: ignore[reportPrivateUsage]
    assert isinstance(process, ChildProcess)
    request = process._hand_over  # pyright: ignore[reportPrivateUsage]
    assert request is not None
    request.fail(Refused("given up"))


async def test_host_keeps_the_child_when_the_keeper_answers_after_the_host_gave_up(marker: str) -> None:
    """KEEP follows an acknowledged hand-over: the keeper and the zygote return to the old host."""
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe")
        await wait_said(command, "ready")
        handed = command.hand_over_nowait(LONG_SECONDS, SECRET)
        wait_holds(command)
        give_up(command)
        with pytest.raises(Refused, match="given up"):
            await handed
        await command.write(b"one\n")
        await wait_said(command, "heard one")
        assert sockets_left() == []
        done = await command.stop()
        assert done.survivors == ()


async def test_hand_over_fails_when_the_command_is_given_up(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe", grace=0.2)
        await wait_said(command, "ready")
        assert command.pid is not None
        with frozen_guards(command.pid):
            handed = command.hand_over_nowait(LONG_SECONDS, SECRET)
            command._crash(RuntimeError("planted"))  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(Refused, match="it was given up"):
                await asyncio.wait_for(handed, 60)
        await asyncio.to_thread(wait_none, marker)
        assert sockets_left() == []


async def test_zygote_hears_of_the_cancellation_when_its_socket_was_full(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe", grace=0.2)
        await wait_said(command, "ready")
        assert command.pid is not None
        fds = f"/proc/{parent_of(parent_of(command.pid))}/fd"
        before = len(os.listdir(fds))
        process = command._process  # pyright: ignore[reportPrivateUsage]
        assert isinstance(process, ChildProcess)
        guardian = process._zygote  # pyright: ignore[reportPrivateUsage]
        assert guardian is not None
        with frozen_guards(command.pid):
            handed = command.hand_over_nowait(LONG_SECONDS, SECRET)
            with contextlib.suppress(BlockingIOError):
                while True:
                    guardian.request(messages.encode(messages.KEEP, 0))
            give_up(command)
            with pytest.raises(Refused, match="given up"):
                await handed
        # The zygote closes the channel to the successor. Otherwise it would kill the keeper after a while.
        await asyncio.to_thread(wait_until, lambda: len(os.listdir(fds)) == before, "the zygote to close the channel")
        await command.stop()


def test_keeper_of_a_gone_tree_sleeps_after_the_death_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[object] = []
    poll = syscalls.poll

    def counted(*args: Any) -> Any:
        polls.append(args)
        return poll(*args)

    monkeypatch.setattr(syscalls, "poll", counted)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "held"))
    listener.listen()
    listener.setblocking(False)
    woken, waker = os.pipe()
    with subprocess.Popen(["true"]) as caller, ours, theirs:
        gone, host = os.pidfd_open(caller.pid), os.pidfd_open(os.getpid())
        order = {"grace": 1.0, "linger": 1.0, "group": None, "terminal": None, "ender": None, "deadline": None}
        # Only its last loop: the loop before it would reap the children of the test.
        one: Any = keeper.Keeper(theirs, host, woken, caller.pid, order, LeaseTimer(None), gone)
        one._poller.unregister(one._leader.fd)
        until = time.monotonic() + SHORT_SECONDS
        path = os.fsencode(tmp_path / "held")
        one._succession._hold = hold.HeldTree(one._poller, listener.detach(), path, SECRET, ((), []), until)
        one._poller.unregister(host)
        one._is_empty = True
        one._stay_for_host()
        for fd in (woken, waker, gone, host, one._leader.fd):
            os.close(fd)
    # Once for the death, and once for the end of the hold.
    assert len(polls) <= 4


def test_answer_without_its_fds_says_that_the_child_is_lost() -> None:
    state = messages.encode(1, 2, 3, 0.0, 1.0, 1.0, False, (("stdin", True),))
    with pytest.raises(MachineError, match="not all of its fds have arrived; it ends now"):
        adoption._answered("x", messages.WIRE + b" yours " + state, [], ())  # pyright: ignore[reportPrivateUsage]


@pytest.mark.thorough
async def test_cancelled_hand_over_leaves_the_keeper_alone(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe", grace=0.2)
        await wait_said(command, "ready")
        handed = command.hand_over_nowait(SHORT_SECONDS, SECRET)
        give_up(command)
        with pytest.raises(Refused, match="given up"):
            await handed
        await asyncio.sleep(zygote.DUTY_SECONDS_MAX + 2.0)
        await command.write(b"one\n")
        await wait_said(command, "heard one")
        await command.stop()


@pytest.mark.parametrize("what", ["write", "stop", "exit", "twice", "sweep"])
async def test_hand_over_is_refused_in_the_middle_of_something(what: str, marker: str) -> None:
    reasons = {
        "write": "a write to its stdin is not finished",
        "stop": "it has exited or is being stopped",
        "exit": "it has exited or is being stopped",
        "twice": "it is being handed over",
        "sweep": "a sweep of its processes is under way",
    }
    code = ECHO.replace("while", "if not fork():\n    os.setsid()\n    be_deaf()\n    stay()\nwhile")
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe", grace=0.2, linger=5)
        await wait_said(command, "ready")
        assert command.pid is not None
        handed: asyncio.Future[str] | None = None
        if what == "write":
            command.put_nowait(b"x" * (1 << 20))
        elif what == "stop":
            command.stop_nowait()
        elif what == "exit":
            os.kill(command.pid, signal.SIGKILL)
            await wait_in_loop(lambda: command.state is not State.RUNNING, "the host does not know of the exit")
        elif what == "twice":
            handed = command.hand_over_nowait(LONG_SECONDS, SECRET)
        # The sweep cannot end before the request.
        with frozen_guards(command.pid) if what == "sweep" else contextlib.nullcontext():
            if what == "sweep":
                command.sweep_nowait(asyncio.get_running_loop().time(), ends=False)
            with pytest.raises(Refused, match=reasons[what]):
                await hand(command)
        if handed is not None:
            command = adopt(await take(await handed), grace=0.2)
        await command.stop(at_once=True)


@pytest.mark.parametrize(
    ("seconds", "secret"),
    [(0, SECRET), (float("inf"), SECRET), (1e9, SECRET), (1, b"short")],
    ids=["zero", "infinite", "long", "short secret"],
)
async def test_hand_over_checks_its_arguments(seconds: float, secret: bytes, marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(ECHO, marker), stdin="pipe")
        with pytest.raises(UsageError, match=r"hold_seconds|secret"):
            await command.hand_over_nowait(seconds, secret)
        await command.stop()


@pytest.mark.thorough
async def test_death_of_the_host_before_the_answer_ends_the_tree(marker: str) -> None:
    code = """
async def main():
    host = banksman.Host()
    command = await start(host, child(WORDS[0], MARKER), stdin="pipe", grace=0.2)
    await wait_said(command, "ready")
    print(parent_of(command.pid), flush=True)
    with frozen_guards(command.pid):
        command.hand_over_nowait(100, bytes(range(32)))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    with running_program(code, marker, STUBBORN) as host:
        assert host.stdout is not None
        [keeper] = host.stdout.readline().split()
        host.wait()
        # The spare keeper continues the zygote, and the zygote continues the keeper.
        await asyncio.to_thread(wait_none, marker)
        await wait_gone(int(keeper))
