"""Arguments of a command: a wrong one is an error with a hint and starts nothing, and a right one reaches the child.

The child gets the values as they were at the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.process.helpers import alive, child, frozen, run_program, start, wait_said, zygote_pid

import banksman
from banksman import Ended, Host, MachineError, ProgramNotExecutable, ProgramNotFound, UsageError
from banksman.process.syscalls import PASSED_FDS_MAX


def assert_says_who_and_how(error: banksman.BanksmanError, kind: type[banksman.BanksmanError]) -> None:
    assert type(error) is kind
    assert isinstance(error, UsageError), "the caller must act"
    assert error.hint, f"no hint: {error}"
    assert error.hint in str(error)


NOBODY = 65534


@pytest.fixture
def nobodys_python() -> str:
    """A Python that a user without rights can run, for programs that become one.

    Their zygote starts after that, from the same Python, and a developer's Python may be in a closed home.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    check = "import sys; assert sys.version_info >= (3, 11); import banksman.runtime.base_host"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            tried = subprocess.run([python, "-c", check], env=SOURCE, user=NOBODY, capture_output=True, check=False)
            if tried.returncode == 0:
                return python
    pytest.skip("there is no Python here that a user without rights can run")


# Variables by which another Python finds the package under test.
SOURCE = {"PYTHONPATH": str(Path(banksman.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}


# -- errors seen before a start --------------------------------------------------------------------------------------
NAN, INF = math.nan, math.inf
OF_ARGV: dict[str, tuple[Any, type[UsageError]]] = {
    "empty": ([], UsageError),
    "a text": ("true MARKER", UsageError),
    "bytes": (b"true MARKER", UsageError),
    "nothing": (None, UsageError),
    "a number": (5, UsageError),
    "a number in it": (["true", "MARKER", 5], UsageError),
    "None in it": (["true", None, "MARKER"], UsageError),
    "NUL": (["true", "MARKER", "a\0b"], UsageError),
    "NUL in the program": (["tr\0ue", "MARKER"], UsageError),
    "not encodable": (["true", "MARKER", "\ud800"], UsageError),
    "empty program": (["", "MARKER"], ProgramNotFound),
    "unknown program": (["no-such-program-anywhere", "MARKER"], ProgramNotFound),
    "unknown path": (["/no/such/program", "MARKER"], ProgramNotFound),
    "path through a file": (["/etc/passwd/program", "MARKER"], ProgramNotFound),
    "a folder": (["/etc", "MARKER"], ProgramNotExecutable),
    "a device": (["/dev/null", "MARKER"], ProgramNotExecutable),
    "not executable": (["/etc/passwd", "MARKER"], ProgramNotExecutable),
    "a name far too long": (["x" * 5000, "MARKER"], ProgramNotFound),
}
SECONDS = ("timeout", "idle_timeout", "grace", "linger", "drain")
WRONG_SECONDS: list[Any] = [-1, -0.001, NAN, -INF, "5", True, []]
OF_OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{name}={value!r}": {name: value} for name in SECONDS for value in WRONG_SECONDS},
    **{f"{name}={value!r}": {name: value} for name in SECONDS[2:] for value in (None, INF)},
    **{
        f"{name}={value!r}": {name: value}
        for name in ("output_bytes_max", "output_total_max")
        for value in (-1, 1.5, "1", True, INF)
    },
    "output_bytes_max=None": {"output_bytes_max": None},
    "stdin is text": {"stdin": "some text"},
    "stdin is a number": {"stdin": 0},
    "stdin is a pipe nobody could write to": {"stdin": "pipe"},
    "on_output": {"on_output": "print"},
    "cwd is not there": {"cwd": "/no/such/folder"},
    "cwd is a file": {"cwd": "/etc/passwd"},
    "cwd is empty": {"cwd": ""},
    "cwd has a NUL": {"cwd": "/tmp\0"},
    "cwd is a number": {"cwd": 3},
    "cwd is not encodable": {"cwd": "/\ud800"},
    "env is a list": {"env": ["A=B"]},
    "env has a number": {"env": {"A": 1}},
    "env has a None": {"env": {"A": None}},
    "env has bytes": {"env": {b"A": b"B"}},
    "env has a number for a name": {"env": {1: "A"}},
    "env has an empty name": {"env": {"": "A"}},
    "env has a name with =": {"env": {"A=B": "C"}},
    "env has a NUL": {"env": {"A": "B\0C"}},
    "env has a NUL in a name": {"env": {"A\0": "B"}},
    "env is not encodable": {"env": {"A": "\ud800"}},
    "env has a name that is not encodable": {"env": {"\ud800": "A"}},
    "scrub is a text": {"scrub": "secrets"},
    "scrub is a number": {"scrub": 5},
    "scrub holds a number": {"scrub": (5,)},
    "scrub holds a number and nothing is inherited": {"scrub": (5,), "inherit_env": False},
    "limits is a list": {"limits": [("nofile", 5)]},
    "an unknown limit": {"limits": {"nosuch": 5}},
    "a limit of nothing": {"limits": {None: 5}},
    "a limit that is text": {"limits": {"nofile": "5"}},
    "a limit that is a half": {"limits": {"nofile": 0.5}},
    "a limit that is True": {"limits": {"nofile": True}},
    "a limit of three": {"limits": {"nofile": (1, 2, 3)}},
    "a limit below nothing": {"limits": {"nofile": -5}},
    "a limit beyond everything": {"limits": {"nofile": 1 << 70}},
    "soft above hard": {"limits": {"nofile": (10, 5)}},
    "soft endless, hard not": {"limits": {"nofile": (resource.RLIM_INFINITY, 5)}},
    "nice beyond everything": {"limits": {"nice": 1 << 40}},
    "nice that is text": {"limits": {"nice": "low"}},
    "oom_score_adj beyond its range": {"limits": {"oom_score_adj": 1001}},
    "pass_fds is a number": {"pass_fds": 5},
    "pass_fds holds a standard stream": {"pass_fds": (1,)},
    "pass_fds holds a negative": {"pass_fds": (-1,)},
    "pass_fds holds text": {"pass_fds": ("5",)},
    "pass_fds holds True": {"pass_fds": (True,)},
    "pass_fds holds a closed one": {"pass_fds": (999_999,)},
    "pass_fds holds more than an int": {"pass_fds": (1 << 40,)},
    "pass_fds are too many": {"pass_fds": tuple(range(3, 4 + PASSED_FDS_MAX))},
}


@pytest.mark.parametrize("case", OF_ARGV)
async def test_invalid_argv_is_a_usage_error_and_spawns_nothing(marker: str, case: str) -> None:
    """The zygote is stopped: a start would get no answer from it, and no error so soon."""
    argv, kind = OF_ARGV[case]
    if isinstance(argv, list):
        argv = [marker if word == "MARKER" else word for word in cast("list[Any]", argv)]
    with frozen(zygote_pid()):
        with pytest.raises(UsageError) as caught:
            await banksman.execute(argv)
        assert_says_who_and_how(caught.value, kind)
        async with Host() as host:
            with pytest.raises(kind):
                await host.start(argv)
            assert host.commands() == []
    assert alive(marker) == []


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("/etc", "cannot run '/etc': /etc is a folder (pass the path of a program)"),
        ("/dev/null", "cannot run '/dev/null': /dev/null is not a regular file (pass the path of a program)"),
        ("./file", "cannot run './file': FOLDER/file is not executable (run chmod +x on it, "),
        ("/no/such", "there is no program '/no/such' at that path (install it, or correct the path)"),
        ("./no", "there is no program './no' at that path (pass its full path, or a path relative to cwd)"),
        ("no-such-program", "there is no program 'no-such-program' on PATH (install it, or pass its full path)"),
    ],
)
async def test_error_of_a_missing_program_has_a_hint_that_fits(tmp_path: Path, word: str, words: str) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(UsageError) as caught:
        await banksman.execute([word], cwd=tmp_path)
    assert str(caught.value).startswith(words.replace("FOLDER", str(tmp_path)))


async def test_error_of_a_relative_program_shows_the_path_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch(0o600)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProgramNotExecutable, match=r"^cannot run './file': ./file is not executable"):
        await banksman.execute(["./file"])


@pytest.mark.parametrize("case", OF_OPTIONS)
async def test_invalid_option_is_a_usage_error_and_spawns_nothing(marker: str, case: str) -> None:
    with frozen(zygote_pid()):
        with pytest.raises(UsageError) as caught:
            await banksman.execute(child("stay()", marker), **OF_OPTIONS[case])
        assert_says_who_and_how(caught.value, UsageError)
    assert alive(marker) == []


@pytest.mark.parametrize("value", WRONG_SECONDS)
async def test_invalid_yield_after_is_a_usage_error_and_spawns_nothing(marker: str, value: Any) -> None:
    async with Host() as host:
        with frozen(zygote_pid()):
            with pytest.raises(UsageError) as caught:
                await host.start(child("stay()", marker), yield_after=value)
            assert_says_who_and_how(caught.value, UsageError)
            assert host.commands() == []
    assert alive(marker) == []


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("/abs/x.db", "cannot use the store '/abs/x.db': it has no scheme (pass sqlite:/abs/x.db)"),
        ("./a:b.db", "cannot use the store './a:b.db': it has no scheme (pass sqlite:./a:b.db)"),
        ("x.db", "cannot use the store 'x.db': it has no scheme (pass sqlite:x.db)"),
        ("", "cannot use the store '': it is empty (pass "),
        ("redis://x", "cannot use the store 'redis://x': its scheme 'redis' is unknown (pass "),
        ("redis://u:pass/word@x", "cannot use the store 'redis://…@x': its scheme 'redis' is unknown (pass "),
        ("nats:u:pass@x", "cannot use the store 'nats:…@x': it has no // after the scheme (pass "),
        ("nats:x", "cannot use the store 'nats:x': it has no // after the scheme (pass "),
        ("memory:x", "cannot use the store 'memory:x': it has text after the colon (pass "),
        ("sqlite:", "cannot use the store 'sqlite:': it has no path (pass "),
        ("sqlite::memory:", "cannot use the store 'sqlite::memory:': it is not the path of a file (pass "),
        ("sqlite:file:x", "cannot use the store 'sqlite:file:x': it is not the path of a file (pass "),
        ("sqlite:x?level=none", "a store cannot have level=none ("),
        ("nats://", "a store on NATS needs a server ("),
        (5, "cannot use the store 5: it is not a string (pass "),
    ],
)
def test_unknown_store_is_a_usage_error(store: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Host(store)
    assert caught.value.hint
    assert str(caught.value).startswith(words)


async def test_pass_fds_with_a_duplicate_is_a_usage_error(marker: str) -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(UsageError) as caught:
            await banksman.execute(child("stay()", marker), pass_fds=(read_end, read_end))
        assert_says_who_and_how(caught.value, UsageError)
    finally:
        os.close(read_end)
        os.close(write_end)


# -- errors that only the kernel sees --------------------------------------------------------------------------------
SCRIPTS: dict[str, bytes] = {
    "garbage": b"\x00\x01\x02 this is no program",
    "a script that names no interpreter": b"echo hello\n",
    "a script whose interpreter is not there": b"#!/no/such/interpreter\n",
    "an empty file": b"",
}


@pytest.mark.parametrize("limits", [None, {"core": 0}])
@pytest.mark.parametrize("case", SCRIPTS)
async def test_unrunnable_file_raises_program_not_executable(
    marker: str, tmp_path: Path, case: str, limits: dict[str, int] | None
) -> None:
    """Also by fork, the other way to start, which commands with limits take. No shell runs the file."""
    path = tmp_path / "program"
    path.write_bytes(SCRIPTS[case])
    path.chmod(0o700)
    with pytest.raises(UsageError) as caught:
        await banksman.execute([path, marker], limits=limits)
    assert_says_who_and_how(caught.value, ProgramNotExecutable)


@pytest.mark.parametrize("limits", [None, {"core": 0}])
@pytest.mark.parametrize("what", ["one word", "many words", "env"])
async def test_argv_and_env_beyond_the_kernel_limit_are_a_usage_error(
    marker: str, what: str, limits: dict[str, int] | None
) -> None:
    """One word of 128 KiB is too long. All words and the environment together may be a few MiB."""
    argv, env = child("stay()", marker), {}
    if what == "one word":
        argv.append("x" * 200_000)
    elif what == "many words":
        argv += ["x" * 100_000] * 100
    else:
        env = {f"V{number}": "x" * 100_000 for number in range(100)}
    with pytest.raises(UsageError) as caught:
        await banksman.execute(argv, env=env, limits=limits)
    assert_says_who_and_how(caught.value, UsageError)
    assert alive(marker) == []


async def test_argv_and_env_just_below_the_kernel_limit_arrive_whole(marker: str) -> None:
    """Far more than one message between the processes could carry."""
    argv = child("say(len(WORDS), sum(map(len, WORDS)), len(os.environ['BIG']))", marker, *["x" * 100_000] * 10)
    done = await banksman.execute(argv, env={"BIG": "y" * 100_000})
    assert done.stdout.text == "10 1000000 100000\n"


async def test_limit_that_only_root_may_raise_is_a_usage_error(marker: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    nr_open = int(Path("/proc/sys/fs/nr_open").read_text())
    # Not even root may have more open files than this.
    assert hard <= nr_open
    with pytest.raises(UsageError) as caught:
        await banksman.execute(child("stay()", marker), limits={"nofile": nr_open + 1})
    assert_says_who_and_how(caught.value, UsageError)
    assert alive(marker) == []


def test_missing_permission_of_the_user_is_a_usage_error(marker: str, nobodys_python: str) -> None:
    """A folder, a program and a limit that are closed to this user, unlike to the root that runs the tests."""
    code = """
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)

async def main():
    for argv, options in (
        ([WORDS[1], MARKER], {}),
        (child("stay()", MARKER), {"cwd": WORDS[0]}),
        (child("stay()", MARKER), {"limits": {"nice": os.getpriority(os.PRIO_PROCESS, 0) - 1}}),
    ):
        try:
            print(await banksman.execute(argv, **options))
        except banksman.UsageError as exc:
            print(type(exc).__name__, bool(exc.hint))

asyncio.run(main())
"""
    with tempfile.TemporaryDirectory() as name:
        # Every user may enter, unlike pytest's folder. So each refusal has its cause in the entry itself.
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o700)
        _make_program(folder / "secret", "secret", mode=0o700)
        done = run_program(code, marker, folder / "closed", folder / "secret", env=SOURCE, python=nobodys_python)
    assert done.stdout == "ProgramNotExecutable True\nUsageError True\nUsageError True\n", done.stderr


# -- the program -----------------------------------------------------------------------------------------------------
async def test_argv_never_passes_through_a_shell(marker: str) -> None:
    words = ["$HOME", "a b", "; ls", "`id`", "*", "", "-n", "\n", "ü"]
    done = await banksman.execute(child("say(*map(ascii, WORDS))", marker, *words))
    assert done.stdout.text == " ".join(map(ascii, words)) + "\n"


async def test_argv_arrives_byte_for_byte(marker: str) -> None:
    odd: list[Any] = [b"\xff\xfe", os.fsdecode(b"\xff"), Path("/a/b")]
    done = await banksman.execute([*child("say(*(os.fsencode(word).hex() for word in WORDS))", marker), *odd])
    assert done.stdout.text.split() == [os.fsencode(word).hex() for word in odd]


def _make_program(path: Path, word: str, mode: int = 0o700) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {word} $0\n")
    path.chmod(mode)


async def test_program_is_found_by_the_childs_path_and_folder(marker: str, tmp_path: Path) -> None:
    """By the PATH of the child, and relative to its starting folder. Files that cannot run are skipped."""
    _make_program(tmp_path / "one" / "tool", "one", mode=0o600)
    _make_program(tmp_path / "two" / "tool", "two")
    _make_program(tmp_path / "three" / "tool", "three")
    (tmp_path / "four" / "tool").mkdir(parents=True)
    path = ":".join(str(tmp_path / name) for name in ("none", "four", "one", "two", "three"))
    done = await banksman.execute(["tool", marker], env={"PATH": path})
    assert done.stdout.text == f"two {tmp_path}/two/tool\n"
    done = await banksman.execute(["./tool", marker], cwd=tmp_path / "three")
    assert done.stdout.text.startswith("three ")
    done = await banksman.execute(["two/tool", marker], cwd=tmp_path)
    assert done.stdout.text.startswith("two ")
    # An empty entry of PATH is the folder in which the child starts.
    done = await banksman.execute(["tool", marker], env={"PATH": ":/none"}, cwd=tmp_path / "three")
    assert done.stdout.text.startswith("three ")
    with pytest.raises(ProgramNotExecutable):
        await banksman.execute(["tool", marker], env={"PATH": str(tmp_path / "one")})
    with pytest.raises(ProgramNotFound):
        await banksman.execute(["tool", marker], env={"PATH": str(tmp_path / "none")})
    with pytest.raises(ProgramNotFound):
        await banksman.execute(["./tool", marker], cwd=tmp_path)


# -- very long waits -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["timeout", "idle_timeout", "grace", "linger", "drain"])
@pytest.mark.parametrize("seconds", [2_147_483, 2_147_484, 3_000_000, 99_999_999.0])
async def test_wait_of_months_is_accepted(marker: str, name: str, seconds: float) -> None:
    """The kernel's poll counts milliseconds in an int, which is 24.8 days.

    The helper outlives its leader, so that the linger runs. Then a stop tests the grace.
    """
    code = 'fork() or (hear(), os._exit(0)); say("ready"); hear()'
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe", **{"linger": 30.0, name: seconds})
        await wait_said(command, "ready")
        await command.close_stdin()
        done = await command.wait()
        assert (done.ended, done.code, done.swept, done.survivors) == (Ended.EXITED, 0, (), ())
        command = await start(host, child("stay()", marker), **{name: seconds})
        done = await command.stop()
        assert (done.ended, done.signal, done.survivors) == (Ended.STOPPED, signal.SIGTERM, ())


@pytest.mark.parametrize("name", ["timeout", "idle_timeout"])
@pytest.mark.parametrize("seconds", [INF, 1e308, 10**400], ids=["inf", "1e308", "10**400"])
async def test_endless_timeout_never_fires(marker: str, name: str, seconds: float) -> None:
    options: dict[str, Any] = {name: seconds}
    done = await banksman.execute(child("sys.exit(0)", marker), **options)
    assert (done.ended, done.code) == (Ended.EXITED, 0)


@pytest.mark.parametrize("seconds", [INF, 1e308, 10**400], ids=["inf", "1e308", "10**400"])
async def test_endless_yield_after_waits_for_the_end(marker: str, seconds: float) -> None:
    async with Host() as host:
        done = await host.start(child("sys.exit(3)", marker), yield_after=seconds)
        assert isinstance(done, banksman.Finished)
        assert done.code == 3


@pytest.mark.parametrize("seconds", [INF, 1e308, 10**400], ids=["inf", "1e308", "10**400"])
async def test_endless_write_timeout_never_fires(marker: str, seconds: float) -> None:
    async with Host() as host:
        command = await start(host, child("sys.exit(len(hear()))", marker), stdin="pipe")
        await command.write(b"123\n", timeout=seconds)
        assert (await command.wait()).code == 3


# -- the environment -------------------------------------------------------------------------------------------------
async def _environment(marker: str, **options: Any) -> dict[str, str]:
    """Return the environment as env(1) prints it: a Python child would add variables."""
    done = await banksman.execute(["env", "-0", f"MARKER={marker}"], **options)
    assert done.code == 0, done
    pairs = (entry.partition("=") for entry in done.stdout.text.split("\0") if entry)
    return {name: value for name, _equals, value in pairs if name != "MARKER"}


async def test_environment_is_inherited_as_of_the_call(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await banksman.execute(child("", marker))  # The zygote is older than the following changes.
    monkeypatch.setenv("BANKSMAN_TEST", "now")
    monkeypatch.setenv("BANKSMAN_ODD", os.fsdecode(b"\xff"))
    environment = await _environment(marker)
    assert environment.items() >= {"BANKSMAN_TEST": "now", "BANKSMAN_ODD": "�"}.items()
    assert (await _environment(marker, env={"BANKSMAN_TEST": "mine"}))["BANKSMAN_TEST"] == "mine"
    monkeypatch.delenv("BANKSMAN_TEST")
    assert "BANKSMAN_TEST" not in await _environment(marker)


async def test_environment_without_inheritance_is_only_what_was_given(marker: str) -> None:
    assert await _environment(marker, inherit_env=False) == {}
    given = {"A": "1", "B": "", "C": "x=y\nz"}
    assert await _environment(marker, inherit_env=False, env=given) == given


SECRET = {
    "MY_API_KEY": "s",
    "GITHUB_TOKEN": "s",
    "AWS_SECRET_ACCESS_KEY": "s",
    "db_password": "s",
    "DATABASE_URL": "s",
}
NESTED = {"CLAUDECODE": "1", "CLAUDE_CODE_ENTRYPOINT": "cli", "GEMINI_CLI": "1"}
PLAIN = {"TOKENIZER": "plain", "KEYBOARD": "plain", "CLAUDE_CONFIG_DIR": "plain"}


@pytest.mark.parametrize(
    ("scrub", "left"),
    [
        ((), SECRET | NESTED | PLAIN),
        (("secrets",), NESTED | PLAIN),
        (("nesting",), SECRET | PLAIN),
        (["nesting", "secrets"], PLAIN),
        ({"secrets", "KEYBOARD"}, NESTED | {"TOKENIZER": "plain", "CLAUDE_CONFIG_DIR": "plain"}),
        (("KEYBOARD",), SECRET | NESTED | {"TOKENIZER": "plain", "CLAUDE_CONFIG_DIR": "plain"}),
    ],
)
async def test_scrub_removes_the_variables_its_policy_names(
    marker: str, monkeypatch: pytest.MonkeyPatch, scrub: Any, left: dict[str, str]
) -> None:
    for name, value in (SECRET | NESTED | PLAIN).items():
        monkeypatch.setenv(name, value)
    environment = await _environment(marker, scrub=scrub)
    assert {name: value for name, value in environment.items() if name in SECRET | NESTED | PLAIN} == left


async def test_scrub_may_be_any_iterable(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that can be iterated only once: every variable is tested, not only the first."""
    for name in SECRET:
        monkeypatch.setenv(name, "s")
    environment = await _environment(marker, scrub=(word for word in ["secrets"]))
    assert environment.keys() & SECRET.keys() == set()


async def test_scrub_keeps_variables_the_caller_adds(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "inherited")
    environment = await _environment(marker, scrub=("secrets", "OTHER"), env={"MY_API_KEY": "given", "OTHER": "given"})
    assert (environment["MY_API_KEY"], environment["OTHER"]) == ("given", "given")


# -- the state of the host at the call -------------------------------------------------------------------------------
CHILD_STATE = """
import resource
os_umask = os.umask(0)
say(os.getcwd(), oct(os_umask), resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE),
    os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)), os.environ.get("AT_THE_CALL"))
"""
HOST_STATE = """
import resource, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

async def seen():
    done = await banksman.execute(child(WORDS[0], MARKER), limits=limits)
    return done.stdout.text + done.stderr.text

def own():
    mask = os.umask(0)
    os.umask(mask)
    return " ".join(map(str, (
        os.getcwd(), oct(mask), resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE),
        os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)), os.environ.get("AT_THE_CALL")))) + "\\n"

def change():
    yield
    os.chdir(WORDS[1]); yield
    os.umask(0o017); yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1])); yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400)); yield
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); yield
    if os.nice(0) < 19:
        os.nice(3); yield
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); yield
    os.environ["AT_THE_CALL"] = "yes"; yield

limits = None if WORDS[2] == "plain" else {"stack": resource.getrlimit(resource.RLIMIT_STACK)}
previous = None
for _ in change():
    expected = own()
    assert expected != previous, "a change that nobody can see"
    previous = expected
    got = asyncio.run(seen())
    assert got == expected, (got, expected)
print("the same")
"""


@pytest.mark.parametrize("way", ["plain", "limits"])
def test_child_has_the_hosts_state_as_of_the_call(marker: str, tmp_path: Path, way: str) -> None:
    """Folder, umask, limits, priority, affinity and environment, each changed after the start of the zygote.

    Both ways to start a child: the usual one, and by fork, which commands with limits take.
    """
    done = run_program(HOST_STATE, marker, CHILD_STATE, tmp_path, way)
    assert (done.stdout, done.stderr) == ("the same\n", "")
    assert alive(marker) == []


@pytest.mark.parametrize("way", ["plain", "limits"])
def test_child_has_the_hosts_user_as_of_the_call(marker: str, nobodys_python: str, way: str) -> None:
    """The program drops its rights after its first command, as servers do. No later command has them."""
    code = """
import resource
limits = None if WORDS[0] == "plain" else {"stack": resource.getrlimit(resource.RLIMIT_STACK)}

async def main():
    done = await banksman.execute(child("say(os.getresuid(), os.getresgid(), os.getgroups())", MARKER), limits=limits)
    print(done.stdout.text + done.stderr.text, end="")

asyncio.run(main())
os.setgroups([12345])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
asyncio.run(main())
"""
    done = run_program(code, marker, way, env=SOURCE, python=nobodys_python)
    before, after = done.stdout.splitlines()
    assert before.startswith("(0, 0, 0)")
    assert after == f"{(NOBODY,) * 3} {(NOBODY,) * 3} [12345]"
    assert (done.stderr, alive(marker)) == ("", [])


async def test_child_starts_in_the_given_folder(marker: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder with a space"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for cwd in (folder, str(folder), tmp_path / "link", os.path.relpath(folder)):
        done = await banksman.execute(child("say(os.getcwd())", marker), cwd=cwd)
        assert done.stdout.text == f"{folder}\n"


def test_command_runs_when_the_programs_folder_was_deleted(marker: str, tmp_path: Path) -> None:
    code = """
os.chdir(WORDS[0])
os.rmdir(WORDS[0])
done = asyncio.run(banksman.execute(child("say('ran')", MARKER)))
print(done.ended, done.stdout.text, end="")
"""
    folder = tmp_path / "gone"
    folder.mkdir()
    done = run_program(code, marker, folder)
    assert (done.stdout, done.stderr) == ("exited ran\n", "")


async def test_child_leads_its_own_session_without_a_terminal(marker: str) -> None:
    code = """
say(os.getpid() == os.getsid(0) == os.getpgid(0))
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as exc:
    say(exc.strerror)
"""
    done = await banksman.execute(child(code, marker))
    assert done.stdout.text == "True\nNo such device or address\n"


@pytest.mark.parametrize("way", ["plain", "limits"])
def test_child_starts_with_default_signals_and_none_blocked(marker: str, way: str) -> None:
    """In a program that ignores some signals and blocks others. The C library uses signals 32 and 33."""
    code = """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2, signal.SIGTTOU):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
limits = {"core": 0} if WORDS[0] == "limits" else None
argv = ["sh", "-c", "exec cat /proc/self/status", MARKER]
print(asyncio.run(banksman.execute(argv, limits=limits)).stdout.text)
# And the other way round: what we did for the child changed nothing here.
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
"""
    done = run_program(code, marker, way)
    assert done.stderr == ""
    of_c_library = 0b11 << 31
    status = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert int(status["SigBlk"], 16) == 0
    assert int(status["SigIgn"], 16) & ~of_c_library == 0


# -- limits ----------------------------------------------------------------------------------------------------------
SHOWS_LIMITS = """
import resource
say(*(resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("NOFILE", "CORE", "FSIZE")),
    os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/oom_score_adj").read().strip())
"""


async def test_limits_apply_to_the_child_only(marker: str) -> None:
    """By any of their names, together, and with so few fds that one limit could prevent the setting of another."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"nofile": (8, 12), "RLIMIT_CORE": 0, resource.RLIMIT_FSIZE: 1 << 30, "nice": 7, "oom_score_adj": 500}
    done = await banksman.execute(child(SHOWS_LIMITS, marker), limits=limits)
    assert done.stdout.text == f"(8, 12) (0, 0) ({1 << 30}, {1 << 30}) 7 500\n", done.stderr.text
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    plain = await banksman.execute(child(SHOWS_LIMITS, marker), limits={})
    assert plain.stdout.text.startswith(str(before))


async def test_limit_ends_the_command_and_not_its_keeper(marker: str) -> None:
    """The kernel sends the signal, so this is the command's own end. Its forks have the limit too."""
    code = """
if fork() == 0:
    os.setsid()
    stay()
fd = os.open(WORDS[0], os.O_WRONLY)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.write(fd, bytes(2000))
os.write(fd, bytes(2000))
"""
    read_end = os.memfd_create("banksman-test")
    try:
        argv = child(code, marker, f"/proc/self/fd/{read_end}")
        done = await banksman.execute(argv, limits={"fsize": 1000}, pass_fds=(read_end,), linger=0)
    finally:
        os.close(read_end)
    assert alive(marker) == []
    assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGXFSZ)
    assert len(done.swept) == 1


def test_raise_fd_limit_leaves_children_the_old_limit(marker: str) -> None:
    code = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (321, hard))
assert banksman.raise_fd_limit() == hard
assert banksman.raise_fd_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
argv = child("import resource; say(resource.getrlimit(resource.RLIMIT_NOFILE))", MARKER)
for limits in (None, {"core": 0}):
    done = asyncio.run(banksman.execute(argv, limits=limits))
    assert done.stdout.text == f"(321, {hard})\\n", done
# An fd that the child's limit has no number for: that is the caller's to know.
high = os.dup2(1, 400)
for limits in (None, {"core": 0}):
    try:
        done = asyncio.run(banksman.execute(child("os.fstat(400)", MARKER), limits=limits, pass_fds=(high,)))
        assert done.code == 0, done
    except banksman.UsageError as exc:
        assert exc.hint
print("as it should be")
"""
    done = run_program(code, marker)
    assert (done.stdout, done.stderr) == ("as it should be\n", "")


# -- fds and stdin ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limits", [None, {"core": 0}])
async def test_pass_fds_arrive_under_their_numbers_and_no_others_do(marker: str, limits: dict[str, int] | None) -> None:
    """The maximum number of fds, including numbers that the guards use, and one fd that was inheritable anyway."""
    inheritable = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    read_end, write_end = os.pipe()
    fds: list[int] = []
    try:
        while len(fds) < PASSED_FDS_MAX:
            fds.append(os.dup(write_end))
        code = """
def is_open(fd):
    try:
        return fd < 3 or os.write(fd, b"x")
    except OSError:
        return False  # The one that listed the folder: it is closed by now.
say(*(fd for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(fd)))
"""
        done = await banksman.execute(child(code, marker), pass_fds=fds, limits=limits)
        assert done.stdout.text.split() == [str(fd) for fd in (0, 1, 2, *sorted(fds))]
        assert os.read(read_end, 1000) == b"x" * len(fds)
        # They still belong to this process too: it passed copies.
        for fd in fds:
            os.fstat(fd)
    finally:
        for fd in (*fds, inheritable, read_end, write_end):
            os.close(fd)


async def test_pass_fds_of_low_numbers_arrive_as_themselves(marker: str) -> None:
    """Low numbers, in every order: placing one must never overwrite another that is not yet placed."""
    pipes = [os.pipe() for _ in range(6)]
    try:
        fds = [write_end for _read_end, write_end in pipes]
        code = "for fd in WORDS: os.write(int(fd), fd.encode())"
        for order in (fds, fds[::-1], fds[1::2] + fds[::2]):
            await banksman.execute(child(code, marker, *fds), pass_fds=order)
            for read_end, write_end in pipes:
                assert os.read(read_end, 100) == str(write_end).encode()
    finally:
        for ends in pipes:
            for fd in ends:
                os.close(fd)


async def test_passed_pipe_is_closed_with_the_tree(marker: str) -> None:
    """No guard keeps a copy: the reader sees the end as soon as the command is over."""
    read_end, write_end = os.pipe()
    async with Host() as host:
        command = await start(host, child('say("ready"); stay()', marker), pass_fds=(write_end,))
        await wait_said(command, "ready")
        os.close(write_end)
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 1)
        await command.stop()
        assert os.read(read_end, 1) == b""
        os.close(read_end)


def test_starts_beyond_the_limit_of_fds_in_flight_only_wait(marker: str, nobodys_python: str) -> None:
    """The kernel allows an ordinary user as many fds in flight between processes as it may have open.

    The zygote is stopped during all requests, so it takes none. Then it continues, and serves every one.
    """
    code = """
import resource
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

async def main():
    fds = [os.dup(1) for _ in range(20)]
    async with banksman.Host() as host:
        with frozen(zygote_pid()):
            starting = [
                asyncio.create_task(host.start(["true", MARKER], pass_fds=fds, yield_after=50)) for _ in range(60)
            ]
            await asyncio.sleep(0)
        results = await asyncio.gather(*starting, return_exceptions=True)
        print({result if isinstance(result, Exception) else result.code for result in results})

asyncio.run(main())
"""
    done = run_program(code, marker, env=SOURCE, python=nobodys_python)
    assert (done.stdout, done.stderr) == ("{0}\n", "")


def test_command_runs_in_a_program_that_may_write_no_files(marker: str) -> None:
    """The limit on file sizes is for the program's files. The library writes no such file to start a command."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
print(asyncio.run(banksman.execute(child("sys.exit(3)", MARKER))).code)
"""
    done = run_program(code, marker)
    assert (done.stdout, done.stderr) == ("3\n", "")


async def test_stdin_is_empty_by_default(marker: str) -> None:
    done = await banksman.execute(child("say(os.readlink('/proc/self/fd/0'), repr(os.read(0, 10)))", marker))
    assert done.stdout.text == "/dev/null b''\n"


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 5_000_000])
async def test_stdin_bytes_arrive_whole_and_end(marker: str, size: int) -> None:
    code = """
data = b""
while piece := os.read(0, 1 << 16):
    data += piece
    os.write(1, piece)
say(len(data), to=2)
"""
    data = os.urandom(size)
    done = await banksman.execute(child(code, marker), stdin=data, output_bytes_max=size + 100)
    assert done.stderr.text == f"{size}\n"
    assert done.stdout.head + done.stdout.tail == data


async def test_stdin_bytes_left_unread_are_no_error(marker: str) -> None:
    """The command exits, or closes its stdin, with megabytes left to write."""
    for code in ("sys.exit(0)", "os.close(0); say('closed')"):
        done = await banksman.execute(child(code, marker), stdin=bytes(5_000_000))
        assert (done.ended, done.code, done.drained) == (Ended.EXITED, 0, True)


async def test_stdin_bytearray_is_copied_at_the_call(marker: str) -> None:
    data = bytearray(b"before\n")
    async with Host() as host:
        command = await start(host, child("say(hear())", marker), stdin=data)
        data[:] = b"after!\n"
        assert (await command.wait()).stdout.text == "before\n"


def test_stdin_inherited_is_the_programs_own(marker: str) -> None:
    code = """
done = asyncio.run(banksman.execute(child("say(hear())", MARKER), stdin="inherit"))
print(done.stdout.text + sys.stdin.readline(), end="")
"""
    done = run_program(code, marker, stdin="for the child\nfor the program\n")
    assert (done.stdout, done.stderr) == ("for the child\nfor the program\n", "")


def test_stdin_inherited_but_closed_is_a_usage_error(marker: str) -> None:
    code = """
async def main():
    os.close(0)
    try:
        await banksman.execute(child("stay()", MARKER), stdin="inherit")
    except banksman.UsageError as exc:
        print(type(exc).__name__, bool(exc.hint))

asyncio.run(main())
"""
    done = run_program(code, marker)
    assert (done.stdout, done.stderr) == ("UsageError True\n", "")


async def test_errors_have_one_base_and_a_builtin_kind(marker: str) -> None:
    """A caller that writes `except ValueError` or `except OSError` catches what it expects."""
    with pytest.raises(ValueError, match="program"):
        await banksman.execute(["no-such-program-anywhere", marker])
    assert issubclass(MachineError, OSError)
    kinds: list[Callable[..., BaseException]] = [UsageError, MachineError, banksman.Refused, banksman.CommandError]
    for kind in kinds:
        error = kind("what happened", hint="what to do")
        assert isinstance(error, banksman.BanksmanError)
        assert str(error) == "what happened (what to do)"
    await asyncio.sleep(0)


@pytest.mark.parametrize("env", [{"TOKEN": b"hunter2secret"}, {"TOKEN": "hunter2secret\ud800"}])
async def test_env_error_names_the_variable_and_not_its_value(env: Any) -> None:
    with pytest.raises(UsageError, match="TOKEN") as refused:
        await banksman.execute(["true"], env=env)
    assert "hunter2" not in str(refused.value)
