"""Programs in restricted places (sandboxes, namespaces, old kernels, bare Pythons), and the remains of a closed loop.

Each of these was a bug once. They change a whole process, so each is a separate program.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import REPOSITORY, alive, child, program, run_program, start, wait_pass
from tests.thorough import one_in, thorough

import banksman
from banksman import Host
from banksman.commands import registry
from banksman.process.process import ChildProcess
from banksman.process.zygote_client import socketpair

pytestmark = thorough

# A kernel that answers ENOSYS to close_range(), as those before 5.9 and some sandboxes do.
NO_CLOSE_RANGE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)

class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

class Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]

def forbid_close_range():
    load_number, is_close_range = Instruction(0x20, 0, 0, 0), Instruction(0x15, 0, 1, 436)
    say_enosys, allow = Instruction(0x06, 0, 0, 0x00050000 | 38), Instruction(0x06, 0, 0, 0x7FFF0000)
    wanted = Filter(4, (Instruction * 4)(load_number, is_close_range, say_enosys, allow))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(wanted), 0, 0) == 0
"""


def assert_said(done: subprocess.CompletedProcess[str], marker: str, expected: str) -> None:
    """Check the output, and that no process is left right after the exit."""
    left = alive(marker)
    assert done.stderr == ""
    assert (done.stdout, done.returncode) == (expected, 0)
    assert left == []


def in_pid_namespace(argv: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run as the first process of a pid namespace. The rest of the namespace ends with it."""
    flags = ("--pid", "--fork", "--kill-child", *flags, *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
    probe = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        if "CI" in os.environ:
            pytest.fail(f"this must be tested, and no pid namespace can be made here: {probe.stderr}")
        pytest.skip(f"NOT TESTED: no pid namespace can be made here: {probe.stderr}")
    argv = ["unshare", *flags, *argv]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


# -- namespaces ------------------------------------------------------------------------------------------------------
def test_start_is_refused_when_proc_shows_another_pid_namespace(marker: str, tmp_path: Path) -> None:
    """The pids in that /proc belong to others: a sweep would kill strangers, and would miss the tree."""
    code = """
try:
    asyncio.run(banksman.execute(["touch", WORDS[0]]))
except banksman.MachineError as exc:
    print("another pid namespace" in str(exc), "mount" in exc.hint)
"""
    assert_said(in_pid_namespace(program(code, marker, tmp_path / "ran")), marker, "True True\n")
    assert not (tmp_path / "ran").exists()


def test_tree_with_wrapped_pids_is_asked_before_it_is_killed(marker: str) -> None:
    """One descendant has a pid above its keeper's, and another a pid below.

    Both get TERM and the grace. A search only above the keeper, where nearly all are, would kill the second without
    TERM.
    """
    code = """
LEADER = '''
LAST_PID = "/proc/sys/kernel/ns_last_pid"
def descend(name):
    if fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: (say(name, "was asked"), os._exit(0)))
        os.write(ready, b"x")
        stay()
said, ready = os.pipe()
descend("above")
with open(LAST_PID, "w") as file:
    file.write("500")
descend("below")
count = 0
while count < 2:
    count += len(os.read(said, 2))
say("ready")
stay()
'''

async def main():
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write("20000")
    async with banksman.Host() as host:
        command = await host.start(child(LEADER, MARKER), grace=10)
        await wait_said(command, "ready")
        assert parent_of(command.pid) > 20000
        done = await command.stop()
        print(sorted(done.stdout.text.splitlines()), rungs(done))

asyncio.run(main())
"""
    done = in_pid_namespace(program(code, marker), "--mount-proc")
    assert_said(done, marker, "['above was asked', 'below was asked', 'ready'] ['term', 'rest']\n")


def test_tree_with_wrapped_pids_is_named_completely(marker: str) -> None:
    """The leader and its child have pids below their keeper's, in one group.

    A kill of the group before a look at those pids would leave the child out of the report.
    """
    code = """
async def main():
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write("20000")
    await banksman.execute(["true"])  # Its keeper is gone; the one in reserve has a pid above 20000.
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write("500")
    async with banksman.Host() as host:
        command = await host.start(child("pid = fork()\\nif pid: say(pid)\\nstay()", MARKER))
        pid = int((await command.read()).text)
        assert parent_of(command.pid) > 20000 > command.pid
        done = await command.stop(at_once=True)
        print([process.pid for process in done.swept] == [pid], done.survivors)

asyncio.run(main())
"""
    assert_said(in_pid_namespace(program(code, marker), "--mount-proc"), marker, "True ()\n")


def test_command_that_mounts_over_proc_is_ended_like_any_other(marker: str) -> None:
    """As a clean-up script that believes it is in its chroot. Its guards must still see its tree."""
    code = """
COVER = '''
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "none", "/proc"], check=True)
assert os.listdir("/proc") == []
be_deaf()
fork() or os.setsid()
say("ready")
stay()
'''

async def main():
    async with banksman.Host() as host:
        command = await host.start(child(COVER, MARKER), grace=0.2)
        await wait_said(command, "ready")
        done = await command.stop()
        print(done.signal, [MARKER in swept.command for swept in done.swept], done.survivors)

asyncio.run(main())
"""
    assert_said(in_pid_namespace(program(code, marker), "--mount-proc"), marker, "9 [True] ()\n")


# -- a program that restricts itself ---------------------------------------------------------------------------------
LOCKS = {
    "no_new_privs": "assert libc.prctl(38, 1, 0, 0, 0) == 0",
    "bounding_set": "assert libc.prctl(24, 21, 0, 0, 0) == 0",
    "seccomp": "forbid_close_range()",
    "oom_score_adj": "open('/proc/self/oom_score_adj', 'w').write('500')",
    "scheduler": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
}


@pytest.mark.parametrize("way", ["plain", "limits"])
@pytest.mark.parametrize("lock", one_in(3, LOCKS))
def test_program_that_locks_itself_down_starts_nothing_outside_its_sandbox(marker: str, lock: str, way: str) -> None:
    """The zygote was made before, and is unrestricted. A command from it would escape from the sandbox."""
    if lock == "bounding_set" and os.geteuid() != 0:
        pytest.skip("needs root, to give up a capability")
    code = f"""
import resource
LOOK = '''
status = [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs", "Seccomp"))]
print(status, open("/proc/self/oom_score_adj").read(), os.sched_getscheduler(0))
'''
limits = None if WORDS[0] == "plain" else {{"stack": resource.getrlimit(resource.RLIMIT_STACK)}}

def seen():
    done = asyncio.run(banksman.execute(child(LOOK, MARKER), limits=limits))
    return done.stdout.text + done.stderr.text

def own():
    import subprocess
    return subprocess.run(child(LOOK, MARKER), capture_output=True, text=True, close_fds=False).stdout

if WORDS[1] == "seccomp":
    {LOCKS["no_new_privs"]}  # Filters need it, and it must not be what gives the change away.
before = own()
print(seen() == before)
{LOCKS[lock]}
assert own() != before, "a change that nobody can see"
print(seen() == own() or (seen(), own()))
"""
    assert_said(run_program(NO_CLOSE_RANGE + code, marker, way, lock), marker, "True\nTrue\n")


# -- missing features of the machine ---------------------------------------------------------------------------------
def test_start_is_quick_without_close_range(marker: str) -> None:
    """Without it, closing "all fds from 4 on" takes two thousand million calls of close(): minutes for each keeper."""
    code = """
forbid_close_range()
from banksman.process.zygote_client import spawner

async def main():
    try:
        return (await asyncio.wait_for(banksman.execute(child("sys.exit(3)", MARKER)), 10)).code
    except TimeoutError:
        spawner._zygote.kill()
        return "too slow"

print(asyncio.run(main()))
"""
    assert_said(run_program(NO_CLOSE_RANGE + code, marker), marker, "3\n")


def test_python_built_without_pidfds_and_memory_files_works(marker: str, tmp_path: Path) -> None:
    """Builds that run on every Linux lack the functions that their build's C library lacked. The kernel still has them.

    The zygote is another interpreter, so it gets one that lacks them too.
    """
    lacking = """
import os, signal, _signal
for module, names in ((os, ("memfd_create", "pidfd_open")), (signal, ["pidfd_send_signal"]),
                      (_signal, ["pidfd_send_signal"])):
    for name in names:
        delattr(module, name)
"""
    python = tmp_path / "python"
    become_zygote = "import runpy, sys\nsys.argv = sys.argv[3:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    python.write_text(f"#!{sys.executable} -IS\n{lacking}{become_zygote}")
    python.chmod(0o700)
    code = """
sys.executable, python = WORDS[0], sys.executable
from banksman.process import syscalls as system
assert not any(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
STUBBORN = "be_deaf(); fork() or os.setsid(); say('ready'); stay()"

async def main():
    # Larger than one message, so it goes by a file.
    done = await banksman.execute([python, "-c", "import os; print(len(os.environ['LONG']))", MARKER],
        env={"LONG": "x" * 50_000})
    print(done.code, done.stdout.text, end="")
    async with banksman.Host() as host:
        argv = [python, *child(STUBBORN, MARKER)[1:]]
        command = await host.start(argv, grace=0.1)
        await wait_said(command, "ready")
        done = await command.stop()
        print(done.signal, len(done.swept), done.survivors)
        # The first order for a process of our own that the host itself signals.
        with frozen(zygote_pid()):
            print(await asyncio.to_thread(banksman.shutdown))

asyncio.run(main())
"""
    interpreter, dash_c, source, *rest = program(code, marker, python)
    argv = [interpreter, dash_c, lacking + source, *rest]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert_said(done, marker, "0 50000\n9 1 ()\nTrue\n")


def test_library_in_a_zip_says_what_it_needs_and_starts_nothing(tmp_path: Path) -> None:
    """The zygote starts from a file. A zip has none, and "the zygote died, try again" would not help."""
    (tmp_path / "program").mkdir()
    shutil.copytree(Path(banksman.__file__).parent, tmp_path / "program" / "banksman")
    zipapp.create_archive(tmp_path / "program", tmp_path / "zipped", main="banksman.cli:main")
    argv = [sys.executable, "-I", "-S", str(tmp_path / "zipped"), "exec", "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert "installed as files" in done.stderr
    assert not (tmp_path / "ran").exists()


# -- forks and loops -------------------------------------------------------------------------------------------------
def test_fork_while_another_thread_binds_a_host_can_run_commands(marker: str) -> None:
    """A thread that is not in the forked process holds the lock at that moment. There it would stay locked forever."""
    code = """
import warnings
from banksman.runtime import loop_bound as bound

warnings.simplefilter("ignore", DeprecationWarning)  # From 3.12 on, of a fork beside threads: it is what this is about.
holds, may_go = threading.Event(), threading.Event()

def hold():
    with bound._lock:
        holds.set()
        may_go.wait()

asyncio.run(banksman.execute(child("", MARKER)))
thread = threading.Thread(target=hold)
thread.start()
holds.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    code = asyncio.run(banksman.execute(child("sys.exit(4)", MARKER))).code
    assert banksman.shutdown()
    os._exit(code)
may_go.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert_said(run_program(code, marker), marker, "4\n")


@pytest.mark.parametrize("end", ["run", "close"])
@pytest.mark.parametrize("whose", one_in(2, ["default", "own"]))
def test_ended_loops_and_their_hosts_are_garbage_collected(marker: str, whose: str, end: str) -> None:
    """Otherwise a program that runs one short loop after another would grow with each of them."""
    code = """
import weakref
left = []

async def main():
    left.append(weakref.ref(asyncio.get_running_loop()))
    if WORDS[0] == "default":
        await banksman.execute(child("", MARKER))
        return
    host = banksman.Host()
    left.append(weakref.ref(host))
    await (await host.start(child("", MARKER))).wait()
    if WORDS[1] == "run":
        await host.close()

def run():
    if WORDS[1] == "run":
        asyncio.run(main())
        return
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()

for _ in range(5):
    run()
# Of a loop that is closed without a word to us we learn when the next one is used.
asyncio.run(banksman.execute(child("", MARKER)))
gc.collect()
hosts = [thing for thing in gc.get_objects() if isinstance(thing, banksman.Host)]
print(len(left) >= 5, [ref() for ref in left if ref() is not None], hosts)
"""
    assert_said(run_program(code, marker, whose, end), marker, "True [] []\n")


def test_ending_program_starts_nothing_more(marker: str) -> None:
    """A thread that still works would get a new zygote after the old one has ended, and its command would outlive the
    program.

    Here an exit handler that runs after the library's makes the start.
    """
    early = "import atexit\natexit.register(lambda: late())\n"
    code = """
def late():
    try:
        asyncio.run(banksman.execute(child("stay()", MARKER), timeout=1))
    except banksman.Refused as exc:
        print(exc)

asyncio.run(banksman.execute(child("", MARKER)))
"""
    interpreter, dash_c, source, *rest = program(code, marker)
    argv = [interpreter, dash_c, early + source, *rest]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=False)
    assert_said(done, marker, "cannot start a command: the program is ending\n")


def test_process_released_by_another_thread_while_its_loop_closes_it_is_safe() -> None:
    """`shutdown` checks for a control socket. Before it uses the socket, the loop has removed it."""

    class Closing(ChildProcess):
        looks = 0

        @property
        def _control(self) -> Any:
            self.looks += 1
            return ours if self.looks == 1 else None

    ours, theirs = socketpair()
    try:
        Closing.__new__(Closing).let_go()
        assert theirs.recv(1) == b""
    finally:
        ours.close()
        theirs.close()


# -- the command line ------------------------------------------------------------------------------------------------
def test_exec_json_is_valid_whatever_the_output_encoding() -> None:
    argv = [sys.executable, "-m", "banksman", "exec", "--json", "--", "printf", r"\303\251"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["stdout"]["text"] == "é"


def test_exec_json_to_a_gone_reader_ends_silently_and_leaves_no_file(tmp_path: Path) -> None:
    """The JSON names the file with the rest of the output. If no reader gets the JSON, nothing deletes the file."""
    argv = [sys.executable, "-m", "banksman", "exec", "--json", "--output-bytes-max", "10", "--"]
    argv += ["head", "-c", "100000", "/dev/zero"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(argv, env=env, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    assert list(tmp_path.iterdir()) == []


# -- careless callers ------------------------------------------------------------------------------------------------
async def test_unreported_ends_are_bounded_and_the_oldest_goes_first(
    marker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "UNREPORTED_MAX", 3)
    async with Host() as host:
        commands = [await start(host, child("", marker)) for _ in range(3)]
        assert caplog.records == []
        commands.append(await start(host, child("", marker)))
        await wait_pass(lambda: all(command.is_over for command in commands))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert commands[0].id in record.getMessage()
        assert host.take_ended() == commands[1:]
        assert host.take_ended() == []


async def test_deleted_spill_file_is_a_gap_and_no_error(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean-up of /tmp must not make `read` fail: head and tail remain, and the gap is counted."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "os.write(1, b'a' * 1000 + b'b' * 50_000 + b'c' * 1000)"
    async with Host() as host:
        command = await start(host, child(code, marker), output_bytes_max=2000)
        done = await command.wait()
        (file,) = tmp_path.glob("*.out")
        assert done.stdout.file == str(file)
        file.unlink()
        head = await command.read()
        tail = await command.read(after=head.next)
    assert (head.data, head.next, head.missed, head.is_end) == (b"a" * 1000, 1000, 0, False)
    assert (tail.data, tail.next, tail.missed, tail.is_end) == (b"c" * 1000, 52_000, 50_000, True)


async def test_async_on_output_is_a_usage_error(marker: str) -> None:
    """It would be called and never awaited: all output would be lost, with only a warning."""

    async def on_output(_stream: str, _data: bytes) -> None:
        pass

    with pytest.raises(banksman.UsageError, match="async"):
        await banksman.execute(child("say('x')", marker), on_output=on_output)  # pyright: ignore[reportArgumentType]
