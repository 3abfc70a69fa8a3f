"""Commands of another user: started by root, or by a helper for other users, and reported where they cannot be ended.

The cases without root run in a program that has become `nobody`. Its helper is a copy of `env` that belongs to root and
is setuid. So its commands have root's rights, and the words `-u USER --` have no relevant effect on `env`. The started
program makes itself root completely, as programs behind sudo are, and then `nobody` cannot signal it. The program keeps
the right to read any folder, because Python may be installed where only root can look.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import (
    NOBODY,
    REPOSITORY,
    alive,
    as_nobody,
    child,
    program,
    rungs,
    start,
    wait_none,
    wait_said,
)

import banksman
from banksman import Host, UsageError
from banksman.process import attributes

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")


@pytest.fixture
def folder() -> Generator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="banksman-user-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def helper(folder: Path) -> Path:
    copy = folder / "env"
    shutil.copy(shutil.which("env") or "/usr/bin/env", copy)
    copy.chmod(0o4755)
    uid = subprocess.run(as_nobody([str(copy), "id", "-u"]), capture_output=True, text=True, check=True)
    if uid.stdout.strip() != "0":
        pytest.skip(f"no program is setuid here: {folder} is mounted nosuid, or no_new_privs is set")
    return copy


# -- root ------------------------------------------------------------------------------------------------------------
SHOWS = """
import json
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
say(json.dumps({
    **{name: status[name].split() for name in ("Uid", "Gid", "Groups", "CapEff")},
    **{name: os.environ.get(name) for name in ("HOME", "USER", "LOGNAME")},
    "cwd": os.getcwd(),
}))
"""


def shown(done: banksman.Finished) -> dict[str, Any]:
    assert done.code == 0, done.stderr.text
    return json.loads(done.stdout.text)


@pytest.fixture
def python(folder: Path) -> Path:
    """A Python that every user can run. The one that runs the tests may be where only root can look."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if found is None:
        pytest.skip("there is no Python that every user can run")
    return Path(found)


@pytest.mark.parametrize("user", ["nobody", NOBODY, str(NOBODY)], ids=repr)
async def test_root_runs_a_command_as_another_user(user: str | int, folder: Path, python: Path, marker: str) -> None:
    argv = [str(python), *child(SHOWS, marker)[1:]]
    seen = shown(await banksman.execute(argv, user=user, cwd=folder))
    entry = pwd.getpwuid(NOBODY)
    assert seen["Uid"] == [str(NOBODY)] * 4
    assert seen["Gid"] == [str(entry.pw_gid)] * 4
    assert {*seen["Groups"]} == {str(group) for group in os.getgrouplist(entry.pw_name, entry.pw_gid)}
    assert int(seen["CapEff"][0], 16) == 0
    assert (seen["HOME"], seen["USER"], seen["LOGNAME"]) == (entry.pw_dir, "nobody", "nobody")
    assert seen["cwd"] == str(folder)


async def test_user_environment_is_overridden_by_the_caller(folder: Path, python: Path, marker: str) -> None:
    argv = [str(python), *child(SHOWS, marker)[1:]]
    seen = shown(await banksman.execute(argv, user="nobody", cwd=folder, env={"HOME": str(folder)}))
    assert (seen["HOME"], seen["USER"]) == (str(folder), "nobody")


def test_user_without_a_home_has_the_root_folder() -> None:
    user = pwd.struct_passwd(("house", "x", 4242, 4242, "", "", "/bin/sh"))
    assert attributes.user_variables(user)[b"HOME"] == b"/"


async def test_user_equal_to_our_own_keeps_its_rights(marker: str) -> None:
    seen = shown(await banksman.execute(child(SHOWS, marker), user="root"))
    assert (seen["Uid"], seen["USER"], seen["HOME"]) == (["0"] * 4, "root", pwd.getpwnam("root").pw_dir)


@pytest.mark.parametrize(
    "user", ["no-such-user-here", 4_294_967_000, "4294967000", "9" * 30, "-7", "²", -7, "", True, 1.5], ids=repr
)
async def test_user_that_does_not_exist_is_a_usage_error(user: Any) -> None:
    with pytest.raises(UsageError, match="user"):
        await banksman.execute(["true"], user=user)


async def test_user_that_cannot_enter_the_folder_is_a_usage_error(folder: Path) -> None:
    closed = folder / "closed"
    inner = closed / "open"
    inner.mkdir(parents=True)
    closed.chmod(0o700)
    for cwd in (closed, inner):
        words = rf"cannot start in {cwd}: Permission denied \(pass a cwd that user nobody may enter\)"
        with pytest.raises(UsageError, match=words):
            await banksman.execute(["true"], user="nobody", cwd=cwd)
    assert (await banksman.execute(["true"], cwd=inner)).code == 0


async def test_root_ends_the_tree_of_another_user(folder: Path, python: Path, marker: str) -> None:
    code = "be_deaf()\nif fork() == 0:\n    os.setsid()\n    say('up')\nstay()"
    async with Host("memory:") as host:
        argv = [str(python), *child(code, marker)[1:]]
        command = await start(host, argv, user="nobody", cwd=folder, grace=0.2)
        await wait_said(command, "up")
        done = await command.stop()
    assert done.survivors == ()
    assert not alive(marker)


async def test_terminal_belongs_to_the_user_of_the_command(folder: Path) -> None:
    script = 'id -u; test -O "$(tty)" && echo mine; : < "$(tty)" && echo opened'
    done = await banksman.execute(["sh", "-c", script], user="nobody", cwd=folder, pty=True)
    assert done.stdout.text.split() == [str(NOBODY), "mine", "opened"]


# -- other users -----------------------------------------------------------------------------------------------------
# The program that the helper runs, or that is setuid itself: it becomes root completely, and its child in another
# session ignores TERM.
BECOMES_ROOT = """
os.setresuid(0, 0, 0)
def leave(*_):
    say("termed")
    os._exit(7)
signal.signal(signal.SIGTERM, leave)
if fork() == 0:
    os.setsid()
    be_deaf()
    say("up as", os.getuid())
stay()
"""
ENDS = """
import json
ENV, HOW, HELPER, *ARGV = WORDS

async def main():
    helper = json.loads(HELPER)
    async with banksman.Host("memory:", user_helper=helper) as host:
        how = {} if "is_own" in HOW else {"user": "root"}
        command = await host.start(([] if how else [ENV]) + ARGV, grace=0.5, **how)
        said = await wait_said(command, "up as 0")
        began = time.monotonic()
        done = await command.stop(at_once="at_once" in HOW)
        print(json.dumps({
            "uid": os.getuid(), "code": done.code, "said": done.stdout.text, "rungs": rungs(done),
            "swept": [swept.pid for swept in done.swept],
            "survivors": [[left.pid, left.why] for left in done.survivors],
            "seconds": time.monotonic() - began,
        }), flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


@contextlib.contextmanager
def ended_as_nobody(marker: str, env: Path, *how: str, user_helper: list[str] | None) -> Generator[dict[str, Any]]:
    """Start a program that becomes root, as `nobody`, and stop it.

    It starts by `user=`, or with "is_own" as a setuid program. The stop may be "at_once". At the end the test kills the
    rest as root. The host stays until then.
    """
    words = (env, ",".join(how), json.dumps(user_helper), *child(BECOMES_ROOT, marker))
    argv = as_nobody(program(ENDS, "no-marker", *words))
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            for pid in left_alive(marker):
                os.kill(pid, signal.SIGKILL)
            process.communicate("end\n", timeout=60)
    assert process.returncode == 0
    wait_none(marker)


def left_alive(marker: str) -> list[int]:
    """Return the marked processes without the host, whose argv contains the words of its command."""
    return sorted(pid for pid in alive(marker) if "no-marker" not in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.mark.parametrize("whose", ["ordered", "is_own"])
def test_user_helper_ends_processes_we_may_not_signal(helper: Path, marker: str, whose: str) -> None:
    with ended_as_nobody(marker, helper, whose, user_helper=[str(helper)]) as seen:
        assert seen["uid"] == NOBODY
        assert (seen["code"], seen["said"].split()) == (7, ["up", "as", "0", "termed"])
        assert seen["rungs"] == ["term", "rest", "kill"]
        assert seen["survivors"] == []
        assert len(seen["swept"]) == 1
        assert not left_alive(marker)


@pytest.mark.parametrize("user_helper", [None, ["false"]])
def test_process_of_user_survives_without_helper(helper: Path, marker: str, user_helper: list[str] | None) -> None:
    with ended_as_nobody(marker, helper, "is_own", user_helper=user_helper) as seen:
        assert {why for _pid, why in seen["survivors"]} == {"no permission to signal it"}
        assert sorted(pid for pid, _why in seen["survivors"]) == left_alive(marker)
        assert len(seen["survivors"]) == 2


@pytest.mark.parametrize("how", ["by the ladder", "at_once"])
def test_user_helper_that_hangs_holds_nothing_up(helper: Path, folder: Path, marker: str, how: str) -> None:
    slow = folder / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with ended_as_nobody(marker, helper, "is_own", how, user_helper=[str(slow)]) as seen:
        assert seen["seconds"] < 7
        assert sorted(pid for pid, _why in seen["survivors"]) == left_alive(marker)


def test_user_helper_ends_what_a_dead_host_leaves(helper: Path, marker: str) -> None:
    code = """
async def main():
    host = banksman.Host("memory:", user_helper=[WORDS[0]])
    command = await host.start(WORDS[1:], user="root", grace=0.2)
    await wait_said(command, "up as 0")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    argv = as_nobody(program(code, "no-marker", helper, *child(BECOMES_ROOT, marker)))
    done = subprocess.run(argv, cwd=REPOSITORY, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_none(marker)


REFUSED = """
async def main():
    try:
        await banksman.execute(["true"], user="root")
    except banksman.UsageError as exc:
        print(exc)
asyncio.run(main())
"""


def test_user_without_permission_says_what_it_takes() -> None:
    done = subprocess.run(
        as_nobody(program(REFUSED, "")), cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert "may not change its user" in done.stdout, done.stderr
    assert "user_helper" in done.stdout


@pytest.mark.parametrize("words", ["sudo", b"bytes", (), ("",), (1,), 7, ("a\0b",)])
def test_user_helper_that_is_malformed_is_a_usage_error(words: Any) -> None:
    with pytest.raises(UsageError, match="user_helper"):
        Host("memory:", user_helper=words)


async def test_user_helper_that_is_missing_raises_at_the_start() -> None:
    async with Host("memory:", user_helper=("no-such-helper-here", "-n")) as host:
        with pytest.raises(banksman.ProgramNotFound):
            await host.start(["true"])
        assert rungs(await banksman.execute(["true"])) == []
