"""Banksman as a library in a program: it changes no state there, tolerates what the program does, and ends with it.

Most tests run a separate program, since they test the state of a whole process. Scenarios 11, 18 and 20.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.process.helpers import (
    REPOSITORY,
    Heard,
    alive,
    child,
    program,
    run_program,
    running_program,
    start,
    state_of,
    wait_none,
    wait_said,
    wait_until,
    zygote_pid,
)

import banksman
from banksman import Ended, Finished, Host

pytestmark = pytest.mark.thorough

# libuv makes a pipe for signals once per process and keeps it. Made here, it does not count as a leak of the first
# test.
uvloop.new_event_loop().close()


def assert_clean(done: subprocess.CompletedProcess[str], marker: str, expected: str = "", code: int = 0) -> None:
    """Check the output, an empty stderr, and that no process is left right after the exit."""
    left = alive(marker)
    assert done.stderr == ""
    assert (done.stdout, done.returncode) == (expected, code)
    assert left == []


# -- the state of the program ----------------------------------------------------------------------------------------
def test_library_changes_no_state_of_the_program(marker: str) -> None:
    """Signal handlers, mask, wakeup fd, subreaper flag, folder, umask, limits, environment, executor, threads."""
    code = """
import ctypes, resource

def subreaper():
    flag = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0) == 0
    return flag.value

def state():
    mask = os.umask(0)
    os.umask(mask)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "handlers": [signal.getsignal(number) for number in range(1, 65) if number not in (32, 33)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakeup": wakeup, "subreaper": subreaper(), "folder": os.getcwd(), "umask": mask,
        "limits": [resource.getrlimit(which) for which in range(16)],
        "environment": dict(os.environb), "threads": threading.enumerate(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "session": (os.getsid(0), os.getpgid(0)),
        "executor": asyncio.get_running_loop()._default_executor,
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
    }

async def main():
    before = state()
    heard = Heard()
    async with banksman.Host() as host:
        during = []
        done = await banksman.execute(child("say('x' * 100)", MARKER), output_bytes_max=10, timeout=30, idle_timeout=30,
            on_output=lambda stream, data: during.append(state()))
        command = await host.start(child("hear(); stay()", MARKER), stdin="pipe")
        await command.write(b"x" * 100)
        during.append(state())
        await command.stop(at_once=True)
        after = state()
    for other in (*during, after, state()):
        assert other == before, {name: (before[name], other[name]) for name in before if before[name] != other[name]}
    assert len(during) >= 2

asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker)


def test_library_raises_no_warning_in_development_mode(marker: str) -> None:
    """asyncio's debug mode checks threads and slow callbacks. Every unclosed resource is an error."""
    code = """
async def main():
    async with banksman.Host() as host:
        command = await host.start(child("say('ready'); hear()", MARKER), stdin="pipe")
        await wait_said(command, "ready")
        running = asyncio.create_task(banksman.execute(child("stay()", MARKER)))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        await command.write(b"go\\n")
        print((await command.wait()).ended)
        await host.start(child("stay()", MARKER))

asyncio.run(main())
gc.collect()
assert banksman.shutdown()
"""
    argv = program(code, marker)
    flags = ["-X", "dev", "-W", "error", "-bb"]
    done = subprocess.run(
        [argv[0], *flags, *argv[1:]], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert_clean(done, marker, "exited\n")


def test_library_works_without_assertions(marker: str) -> None:
    """`python -O`: no assert may have a needed side effect."""
    code = """
async def main():
    async with banksman.Host() as host:
        command = await host.start(child("fork() or os.setsid(); say('ready'); hear(); stay()", MARKER), stdin="pipe")
        await wait_said(command, "ready")
        await command.write(b"go\\n")
        done = await command.stop()
        print(done.ended, alive(MARKER) == [])

asyncio.run(main())
"""
    argv = program(code, marker)
    done = subprocess.run(
        [argv[0], "-O", *argv[1:]], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert_clean(done, marker, "stopped True\n")


async def test_library_leaves_the_programs_own_children_alone(marker: str) -> None:
    """The library does not reap, signal or count children of `subprocess` or of a plain fork."""
    own = subprocess.Popen(child("hear(); sys.exit(7)", marker), stdin=subprocess.PIPE)
    try:
        async with Host() as host:
            command = await start(host, child('fork(); say("ready"); stay()', marker))
            await wait_said(command, "ready")
            await command.stop(at_once=True)
        assert alive(marker) == [own.pid]
        assert own.stdin is not None
        own.stdin.write(b"go\n")
        own.stdin.close()
        assert own.wait() == 7
    finally:
        own.kill()
        own.wait()


# -- loops and threads -----------------------------------------------------------------------------------------------
async def _use_everything(marker: str) -> None:
    """Use every feature that needs something of the loop."""
    heard = Heard()
    done = await banksman.execute(child("os.write(1, bytes(3_000_000)); say('x', to=2)", marker), on_output=heard)
    assert (done.ended, done.stdout.total, done.stderr.text) == (Ended.EXITED, 3_000_000, "x\n")
    done = await banksman.execute(child("be_deaf(); say('ready'); stay()", marker), timeout=0.5, grace=0.2)
    assert done.ended is Ended.TIMEOUT
    data = os.urandom(500_000)
    code = "while piece := os.read(0, 65536): os.write(1, piece)"
    done = await banksman.execute(child(code, marker), stdin=data)
    assert done.stdout.head + done.stdout.tail == data
    running = asyncio.create_task(banksman.execute(child("say('ready'); stay()", marker), on_output=heard))
    await heard.wait("ready")
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    async with Host() as host:
        command = await start(
            host, child("fork() or os.setsid(); say('ready'); hear(); say('end')", marker), stdin="pipe"
        )
        await wait_said(command, "ready")
        command.pause_reading()
        await command.write(b"a\n", timeout=30)
        command.resume_reading()
        await wait_said(command, "end")
        results = await asyncio.gather(*(host.start(child("sys.exit(4)", marker), yield_after=30) for _ in range(10)))
        assert [done.code for done in results if isinstance(done, Finished)] == [4] * 10
        await start(host, child("be_deaf(); stay()", marker), grace=0.2)
    with pytest.raises(banksman.ProgramNotFound):
        await banksman.execute(["no-such-program-anywhere", marker])


def _run_in(loop_factory: Any, marker: str) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_use_everything(marker))


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("kind", LOOPS)
def test_library_works_in_either_kind_of_loop_in_the_main_thread(marker: str, kind: str) -> None:
    _run_in(LOOPS[kind], marker)
    assert alive(marker) == []


def _in_threads(*works: Any) -> None:
    """Run each function in a thread, all at the same time, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", LOOPS)
def test_library_works_in_a_loop_on_another_thread(marker: str, kind: str) -> None:
    _in_threads(lambda: _run_in(LOOPS[kind], marker))
    assert alive(marker) == []


def test_library_works_in_several_loops_at_once(marker: str) -> None:
    _in_threads(*(lambda kind=kind: _run_in(LOOPS[kind], marker) for kind in (*LOOPS, *LOOPS)))
    assert alive(marker) == []


def test_two_loops_that_take_turns_do_not_mix(marker: str) -> None:
    """Both loops are in one thread, and the commands of each run while the other loop has its turn."""
    loops = [asyncio.new_event_loop() for _ in range(2)]
    hosts = [Host() for _ in loops]
    try:
        commands = [
            loop.run_until_complete(start(host, child(f"say({n}); hear(); sys.exit({n})", marker), stdin="pipe"))
            for n, (loop, host) in enumerate(zip(loops, hosts, strict=True))
        ]
        for n in (1, 0, 1, 0):
            loops[n].run_until_complete(wait_said(commands[n], str(n)))
        for n in (1, 0):
            loops[n].run_until_complete(commands[n].write(b"go\n"))
            assert loops[n].run_until_complete(commands[n].wait()).code == n
    finally:
        for loop, host in zip(loops, hosts, strict=True):
            loop.run_until_complete(host.close())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    assert alive(marker) == []


def test_short_loops_in_many_threads_share_one_zygote(marker: str) -> None:
    """Threads switch between any two bytecodes here, so that shared state is really contended."""
    zygote = zygote_pid()
    before = sys.getswitchinterval()

    def work() -> None:
        for _ in range(12):
            done = asyncio.run(banksman.execute(["true", marker]))
            assert (done.ended, done.code) == (Ended.EXITED, 0)

    sys.setswitchinterval(1e-6)
    try:
        _in_threads(*[work] * 8)
    finally:
        sys.setswitchinterval(before)
    assert zygote_pid() == zygote
    assert alive(marker) == []


def test_command_started_from_a_short_lived_thread_lives_on(marker: str) -> None:
    """Scenario 20: the kernel binds a parent-death signal to the *thread* that spawned.

    Here a thread that ends immediately makes the first spawn, which starts the zygote, and another makes the next. The
    commands continue under another thread.
    """
    code = """
loop = asyncio.new_event_loop()
host = banksman.Host()
commands = []

def spawn():
    argv = child("say('ready'); hear(); sys.exit(5)", MARKER)
    commands.append(loop.run_until_complete(host.start(argv, stdin="pipe")))

async def finish():
    for command in commands:
        await wait_said(command, "ready")
        assert command.state == "running"
        await command.write(b"go\\n")
        assert (await command.wait()).code == 5
    await host.close()
    print("all lived")

for _ in range(2):
    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join()
loop.run_until_complete(finish())
loop.run_until_complete(loop.shutdown_asyncgens())
loop.close()
"""
    assert_clean(run_program(code, marker), marker, "all lived\n")


# -- actions of the program ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before_the_loop", "inside_the_loop"])
def test_library_opens_no_file_on_closed_standard_fds(marker: str, tmp_path: Path, when: str) -> None:
    """The kernel hands out 0, 1 and 2 again. The next print() of any code would write into the file there."""
    code = """
def close_stdio():
    for fd in (0, 1, 2):
        os.close(fd)

def standard():
    found = []
    for fd in (0, 1, 2):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            found.append("closed")
    return found

async def main():
    if WORDS[1] == "inside_the_loop":
        close_stdio()
    before = standard()
    seen = []
    async with banksman.Host() as host:
        done = await banksman.execute(
            child("data = os.read(0, 100)\\nfor _ in range(100): os.write(1, bytes(65536)); os.write(2, data)", MARKER),
            stdin=b"x", output_bytes_max=10, on_output=lambda stream, data: seen.append(standard()))
        assert (done.stdout.total, done.stderr.total, done.drained) == (100 * 65536, 100, True), done
        command = await host.start(child("say('ready'); stay()", MARKER), stdin="pipe")
        await wait_said(command, "ready")
        seen.append(standard())
        await command.stop()
    assert len(seen) > 10
    for other in seen:
        assert other == before, (before, other)
    return "as it was"

if WORDS[1] == "before_the_loop":
    close_stdio()
try:
    said = asyncio.run(main())
except BaseException as exc:
    said = repr(exc)
with open(WORDS[0], "w") as file:
    file.write(said)
"""
    said = tmp_path / "said"
    done = run_program(code, marker, said, when)
    assert alive(marker) == []
    assert (said.read_text(), done.stdout, done.stderr) == ("as it was", "", "")


def test_fork_of_the_program_holds_none_of_our_pipes(marker: str) -> None:
    """The forked process lives on, and the command's pipes still end.

    Its stdin ends at the close, and its output with the tree.
    """
    code = """
async def main():
    async with banksman.Host() as host:
        argv = child("say('ready')\\nwhile hear(): pass\\nsay('end of input')", MARKER)
        command = await host.start(argv, stdin="pipe")
        await wait_said(command, "ready")
        held, hold = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hold)
            os.read(held, 1)
            os._exit(0)
        os.close(held)
        await command.close_stdin()
        done = await command.wait()
        print(done.ended, done.code, done.drained, done.stdout.text.split())
        os.close(hold)
        os.waitpid(pid, 0)

asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker, "exited 0 True ['ready', 'end', 'of', 'input']\n")


def test_fork_during_waiting_starts_holds_none_of_their_pipes(marker: str) -> None:
    """A waiting start has both ends of its pipes.

    The forked process must not have them, or the pipes would never end.
    """
    code = """
async def main():
    held, hold = os.pipe()
    async with banksman.Host() as host:
        with frozen(zygote_pid()):
            # Somewhat more than its queue takes.
            starting = [asyncio.create_task(host.start(["true", MARKER], yield_after=50)) for _ in range(130)]
            await asyncio.sleep(0)
            pid = os.fork()
            if pid == 0:
                os.close(hold)
                os.read(held, 1)
                os._exit(0)
        results = await asyncio.gather(*starting)
        print({(done.code, done.drained) for done in results})
    os.close(hold)
    os.waitpid(pid, 0)

asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker, "{(0, True)}\n")


def test_library_works_beside_multiprocessing(marker: str) -> None:
    """A forked worker lives through a command's life and uses Banksman too. Its exit ends no command of the parent."""
    code = """
import multiprocessing
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later say so of any fork beside a thread.

def work(number):
    done = asyncio.run(banksman.execute(child(f"sys.exit({number})", MARKER)))
    return done.code

async def main():
    async with banksman.Host() as host:
        command = await host.start(child("say('ready'); hear(); sys.exit(9)", MARKER), stdin="pipe")
        await wait_said(command, "ready")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, range(4)))
            assert command.state == "running"
            await command.write(b"go\\n")
            done = await command.wait()
            print(done.code, done.drained, done.swept)
        print((await banksman.execute(child("sys.exit(8)", MARKER))).code)

asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker, "[0, 1, 2, 3]\n9 True ()\n8\n")


@pytest.mark.parametrize("how", ["waits_for_any_child", "ignores_sigchld"])
def test_library_works_in_a_program_that_reaps_every_child(marker: str, how: str) -> None:
    """The zygote is a child of the program, which may reap it before the library does. The test also kills zygotes."""
    code = """
reaped = []

def reap():
    while True:
        try:
            reaped.append(os.waitpid(-1, 0)[0])
        except ChildProcessError:
            time.sleep(0.001)

if WORDS[0] == "ignores_sigchld":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
else:
    threading.Thread(target=reap, daemon=True).start()

async def main():
    zygotes = []
    for number in range(3):
        done = await banksman.execute(child(f"fork() or os.setsid(); sys.exit({number})", MARKER))
        assert (done.ended, done.code) == ("exited", number), done
        zygotes.append(zygote_pid())
        os.kill(zygotes[-1], signal.SIGKILL)
        while os.path.exists(f"/proc/{zygotes[-1]}"):
            await asyncio.sleep(0.001)
    assert len(set(zygotes)) == 3
    assert (await banksman.execute(child("sys.exit(6)", MARKER))).code == 6
    print(banksman.shutdown())

asyncio.run(main())
"""
    assert_clean(run_program(code, marker, how), marker, "True\n")


def test_write_to_closed_stdin_does_not_kill_a_program_with_default_sigpipe(marker: str) -> None:
    """In the main thread and in another. The mask and the handler stay the same."""
    code = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)

async def main():
    async with banksman.Host() as host:
        command = await host.start(child("os.close(0); say('ready'); stay()", MARKER), stdin="pipe")
        await wait_said(command, "ready")
        try:
            await command.write(b"x" * 100_000)
        except banksman.CommandError as exc:
            print(type(exc).__name__)
        # Bytes for one that exits without reading them.
        print((await banksman.execute(child("", MARKER), stdin=bytes(1_000_000))).ended)
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert signal.sigpending() == set()

asyncio.run(main())
thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
"""
    assert_clean(run_program(code, marker), marker, "CommandError\nexited\n" * 2)


def test_library_processes_hold_no_folder_of_the_program(marker: str, tmp_path: Path) -> None:
    """The folder may be on a mount that an operator wants to unmount.

    The program has left it, and only the command is there.
    """
    code = """
os.chdir(WORDS[0])

async def main():
    async with banksman.Host() as host:
        command = await host.start(child("say('ready'); stay()", MARKER))
        await wait_said(command, "ready")
        os.chdir("/")
        ours = [zygote_pid()]
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if open(f"/proc/{pid}/comm").read().startswith("banksman-") and int(
                        open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]) == ours[0]:
                    ours.append(pid)
        assert len(ours) > 1
        print({os.readlink(f"/proc/{pid}/cwd") for pid in ours})

asyncio.run(main())
"""
    assert_clean(run_program("import contextlib\n" + code, marker, tmp_path), marker, "{'/'}\n")


async def test_killed_zygote_is_replaced_and_running_commands_continue(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('say("ready"); hear(); sys.exit(3)', marker), stdin="pipe")
        await wait_said(command, "ready")
        zygote = zygote_pid()
        os.kill(zygote, signal.SIGKILL)
        # While the zygote dies, its socket still takes orders. These then fail with an error that suggests a retry.
        wait_until(lambda: state_of(zygote) in ("Z", ""), "the zygote's death")
        results = await asyncio.gather(*(banksman.execute(child("sys.exit(0)", marker)) for _ in range(5)))
        assert {done.code for done in results} == {0}
        assert zygote_pid() != zygote
        await command.write(b"go\n")
        assert (await command.wait()).code == 3
    wait_until(lambda: state_of(zygote) == "", "the dead zygote to be reaped")


# -- loops that end without a shutdown -------------------------------------------------------------------------------
@pytest.mark.parametrize("whose", ["default", "own"])
def test_loop_closed_without_shutdown_leaks_nothing_after_the_next_use(marker: str, tmp_path: Path, whose: str) -> None:
    """`loop.close()` and nothing else. By the next use of the library the tree, the fds and the spill file are gone."""
    code = """
from banksman.process.zygote_client import spawner

def fds():
    return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{name}"))

async def begin():
    argv = child("fork() or os.setsid(); os.write(1, bytes(100000)); say('ready', to=2); stay()", MARKER)
    if WORDS[0] == "own":
        host = banksman.Host()
        command = await host.start(argv, output_bytes_max=10, grace=0.2, stdin="pipe")
        await wait_said(command, "ready", stream="stderr")
    else:
        heard = Heard()
        running = asyncio.ensure_future(banksman.execute(argv, output_bytes_max=10, grace=0.2, on_output=heard))
        await heard.wait("ready")
        # Otherwise asyncio complains, with reason, about a task that was never finished.
        running._log_destroy_pending = False

zygote_pid()
before = fds()
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
assert len(alive(MARKER)) == 2, alive(MARKER)
assert os.listdir(WORDS[1])
loop.close()
del loop
gc.collect()
print(asyncio.run(banksman.execute(child("sys.exit(4)", MARKER))).code)
gc.collect()
deadline = time.monotonic() + 20
while alive(MARKER) != [] and time.monotonic() < deadline:
    time.sleep(0.005)
assert alive(MARKER) == []
assert fds() == before, (before, fds())
assert os.listdir(WORDS[1]) == []
# The zygote counts its commands, so that one that is replaced can leave: none is left to count.
old = zygote_pid()
os.nice(1)
asyncio.run(banksman.execute(child("", MARKER)))
while os.path.exists(f"/proc/{old}") and time.monotonic() < deadline:
    spawner._reap_retired()
    time.sleep(0.005)
assert not os.path.exists(f"/proc/{old}")
"""
    assert_clean(run_program(code, marker, whose, tmp_path, env={"TMPDIR": str(tmp_path)}), marker, "4\n")


def test_start_during_loop_shutdown_is_refused(marker: str) -> None:
    """Scenario 18. The loop closes its async generators, including the library's, in no particular order.

    Whichever comes first, the command of the other is refused or ended, and no host is made that nothing would drain.
    """
    code = """
import warnings
warnings.simplefilter("error")

async def late():
    try:
        yield
    finally:
        # By now every generator has been asked to close, ours as well.
        await asyncio.sleep(0.05)
        try:
            await banksman.execute(child("stay()", MARKER))
        except banksman.Refused as exc:
            print("refused", bool(exc.hint))

async def main():
    await banksman.execute(child("", MARKER))
    generator = late()
    await generator.__anext__()
    return generator

generator = asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker, "refused True\n")


async def test_host_dropped_without_close_is_drained_at_the_end_of_its_loop(marker: str) -> None:
    """No reference to the host exists. It references itself as long as a command runs."""

    async def drop() -> None:
        command = await start(Host(), child('say("ready"); stay()', marker))
        await wait_said(command, "ready")

    def run() -> None:
        async def main() -> None:
            await drop()
            gc.collect()
            assert len(alive(marker)) == 1

        asyncio.run(main())

    await asyncio.to_thread(run)
    assert alive(marker) == []


# -- the end of the program ------------------------------------------------------------------------------------------
GOES = """
def main():
    loop = asyncio.new_event_loop()
    host = banksman.Host()

    async def begin():
        argv = child("be_deaf(); fork() or os.setsid(); say('ready'); stay()", MARKER)
        command = await host.start(argv, grace=0.3)
        await wait_said(command, "ready")
        return command

    command = loop.run_until_complete(begin())
    print("ready", flush=True)
    return loop, host, command

"""
WAYS: dict[str, tuple[str, int]] = {
    "falls_off_its_end": ("kept = main()", 0),
    "drops_everything": ("main(); gc.collect()", 0),
    "sys_exit": ("main(); sys.exit(3)", 3),
    "exception": ("main(); raise SystemExit(4)", 4),
    "in_a_daemon_thread": (
        "started = threading.Event()\n"
        "def work():\n"
        "    loop, host, command = main()\n"
        "    started.set()\n"
        "    loop.run_until_complete(command.wait())\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "started.wait()",
        0,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_interpreter_exit_without_close_leaves_nothing(marker: str, way: str) -> None:
    """Scenario 11: the exit waits for the trees, which ignore TERM, so no process is left afterwards."""
    code, status = WAYS[way]
    done = run_program(GOES + code, marker)
    left = alive(marker)
    assert (done.stdout, done.returncode) == ("ready\n", status)
    assert left == []
    if way != "in_a_daemon_thread":
        assert done.stderr == ""


def test_uncaught_exception_is_shown_and_leaves_nothing(marker: str) -> None:
    done = run_program(GOES + "main(); 1 / 0", marker)
    assert alive(marker) == []
    assert (done.stdout, done.returncode) == ("ready\n", 1)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("way", ["os._exit(7)", "os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_program_that_dies_without_exit_handlers_leaves_nothing(marker: str, way: str) -> None:
    """Scenario 11 without exit handlers: the guards notice the death, and need a moment."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); main(); {way}"
    done = run_program(GOES + code, marker)
    assert done.stdout == "ready\n"
    assert done.returncode != 0
    wait_none(marker)


def test_interrupted_program_ends_its_trees_before_it_exits(marker: str) -> None:
    """Ctrl-C: asyncio cancels the main task, and the end of the loop ends its commands."""
    code = """
async def main():
    async with banksman.Host() as host:
        command = await host.start(child("be_deaf(); fork() or os.setsid(); say('ready'); stay()", MARKER), grace=0.3)
        await wait_said(command, "ready")
        print("ready", flush=True)
        await command.wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print(alive(MARKER) == [], flush=True)
"""
    with running_program(code, marker) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == "True\n"
        assert running.wait() == 0
    assert alive(marker) == []


def test_program_output_ends_with_the_program(marker: str) -> None:
    """No process of the library holds the program's stdout or stderr.

    So `program | less` ends with the program, also while the guards still end a stubborn tree.
    """
    code = GOES.replace("grace=0.3", "grace=2") + "main(); os._exit(0)"
    with running_program(code, marker) as running:
        assert running.stdout is not None
        assert running.stdout.read() == "ready\n"
        assert running.wait() == 0
        assert alive(marker), "the tree had a grace of two seconds, and the end of the output did not wait for it"
        wait_none(marker)


# -- shutdown --------------------------------------------------------------------------------------------------------
def test_shutdown_ends_and_awaits_the_commands_of_every_loop(marker: str) -> None:
    """From any thread, repeatedly and concurrently. A later command starts a new zygote."""
    code = """
results, started = [], threading.Barrier(3)

async def run():
    heard = Heard()
    argv = child("be_deaf(); fork() or os.setsid(); say('ready'); stay()", MARKER)
    running = asyncio.create_task(banksman.execute(argv, grace=0.3, on_output=heard))
    await heard.wait("ready")
    started.wait()
    results.append((await running).ended)

threads = [threading.Thread(target=asyncio.run, args=(run(),)) for _ in range(2)]
for thread in threads:
    thread.start()
started.wait()
zygote = zygote_pid()
others = [threading.Thread(target=banksman.shutdown) for _ in range(3)]
for thread in others:
    thread.start()
assert banksman.shutdown()
for thread in (*threads, *others):
    thread.join()
assert alive(MARKER) == []
assert not os.path.exists(f"/proc/{zygote}")
print(*results)
assert banksman.shutdown()
print(asyncio.run(banksman.execute(child("sys.exit(2)", MARKER))).code)
assert zygote_pid() != zygote
"""
    assert_clean(run_program(code, marker), marker, "host_closed host_closed\n2\n")


def test_shutdown_returns_true_only_when_over_though_another_thread_began_it(marker: str) -> None:
    """A caller that gets True may rely on it: of concurrent calls, none returns True while the tree lives."""
    code = """
async def main():
    heard = Heard()
    running = asyncio.create_task(
        banksman.execute(child("be_deaf(); say('ready'); stay()", MARKER), grace=0.5, on_output=heard))
    await heard.wait("ready")
    seen = []
    def shut():
        seen.append((banksman.shutdown(), alive(MARKER) == []))
    threads = [threading.Thread(target=shut) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(set(seen))
    print((await running).ended)

asyncio.run(main())
"""
    assert_clean(run_program(code, marker), marker, "{(True, True)}\nhost_closed\n")


def test_shutdown_imports_nothing() -> None:
    """Signal handlers call it: a second signal would find a half-imported module."""
    code = """
import sys, banksman
before = set(sys.modules)
assert banksman.shutdown()
print(set(sys.modules) - before)
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "set()\n"


def test_shutdown_in_a_signal_handler_may_be_entered_twice(marker: str) -> None:
    """An impatient service manager or user: the handler is entered again while the first call waits."""
    code = """
def on_term(number, frame):
    os.write(1, b"asked\\n")  # Not print(), which must not be entered again by a signal that comes inside of it.
    banksman.shutdown()
    os._exit(5)

async def main():
    async with banksman.Host() as host:
        command = await host.start(child("be_deaf(); say('ready'); stay()", MARKER), grace=2)
        await wait_said(command, "ready")
        signal.signal(signal.SIGTERM, on_term)
        print("ready", flush=True)
        await command.wait()

asyncio.run(main())
"""
    with running_program(code, marker) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        for _ in range(2):
            running.send_signal(signal.SIGTERM)
            assert running.stdout.readline() == "asked\n"
        assert running.wait() == 5
    wait_none(marker)
