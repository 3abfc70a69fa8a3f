"""Keywords of `subprocess.Popen` in `banksman.asyncio`, and the errors of a start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from banksman import asyncio as basyncio
from banksman.asyncio import PIPE

NOBODY = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


async def output(*words: Any, **keywords: Any) -> str:
    process = await basyncio.create_subprocess_exec(*words, stdout=PIPE, **keywords)
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    return stdout.decode().strip()


async def python(code: str, **keywords: Any) -> str:
    return await output(sys.executable, "-I", "-S", "-c", f"import os, sys; print({code})", **keywords)


# -- supported -------------------------------------------------------------------------------------------------------
async def test_cwd_is_the_folder_of_the_child(tmp_path: Path) -> None:
    assert await output("pwd", cwd=tmp_path) == str(tmp_path)
    assert await output("pwd", cwd=os.fsencode(tmp_path)) == str(tmp_path)


async def test_env_replaces_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN", "here")
    assert await output("/usr/bin/env", env={"ONLY": "this"}) == "ONLY=this"
    assert await output("/usr/bin/env", env={b"ONLY": b"bytes"}) == "ONLY=bytes"
    assert "SEEN=here" in (await output("/usr/bin/env")).splitlines()


async def test_executable_runs_in_place_of_the_first_word() -> None:
    assert await output("shown", "-c", "echo $0", executable="/bin/sh") == "shown"


async def test_executable_replaces_the_shell() -> None:
    process = await basyncio.create_subprocess_shell("echo $0", stdout=PIPE, executable="/bin/bash")
    assert (await process.communicate())[0] == b"/bin/bash\n"


async def test_shell_takes_bytes() -> None:
    process = await basyncio.create_subprocess_shell(b"echo \xff", stdout=PIPE)
    assert (await process.communicate())[0] == b"\xff\n"


async def test_umask_is_the_umask_of_the_child() -> None:
    assert await output("sh", "-c", "umask", umask=0o027) == "0027"


async def test_pass_fds_keep_their_numbers() -> None:
    read_end, write_end = os.pipe()
    try:
        await python(f"os.write({write_end}, b'passed')", pass_fds=(write_end,))
        assert os.read(read_end, 100) == b"passed"
    finally:
        os.close(read_end)
        os.close(write_end)


async def test_close_fds_false_passes_the_inheritable_fds_only() -> None:
    read_end, write_end = os.pipe()
    try:
        os.set_inheritable(write_end, True)
        code = f"os.get_inheritable({write_end}), os.path.exists('/proc/self/fd/{read_end}')"
        assert await python(code, close_fds=False) == "True False"
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("start_new_session", [False, True])
async def test_child_always_leads_a_session(start_new_session: bool) -> None:
    code = "os.getsid(0) == os.getpgid(0) == os.getpid()"
    assert await python(code, start_new_session=start_new_session, process_group=0) == "True"


async def test_pipesize_sets_the_capacity_of_the_pipes() -> None:
    assert await python("__import__('fcntl').fcntl(1, 1032)", pipesize=4096) == "4096"


@is_root
async def test_user_and_groups_change_as_with_popen() -> None:
    ids = "sh", "-c", "id -u; id -g; id -G"
    user, group, groups = (await output(*ids, user=NOBODY)).splitlines()
    assert (int(user), int(group)) == (NOBODY, os.getgid())
    assert set(map(int, groups.split())) == {os.getgid(), *os.getgroups()}
    everything = await output(*ids, user="nobody", group=NOBODY, extra_groups=[1, 2])
    assert everything == f"{NOBODY}\n{NOBODY}\n{NOBODY} 1 2"


# -- refused ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preexec_fn", print),
        ("universal_newlines", True),
        ("text", True),
        ("encoding", "utf-8"),
        ("errors", "strict"),
        ("bufsize", 1),
        ("shell", True),
        ("restore_signals", False),
        ("process_group", 1234),
        ("startupinfo", object()),
        ("creationflags", 1),
        ("user", -1),
    ],
)
async def test_unsupported_value_is_an_error_that_names_the_keyword(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        await basyncio.create_subprocess_exec("true", **{name: value})


async def test_default_values_of_popen_are_accepted() -> None:
    defaults: dict[str, Any] = {
        "preexec_fn": None,
        "universal_newlines": False,
        "text": None,
        "encoding": None,
        "errors": None,
        "bufsize": 0,
        "shell": False,
        "restore_signals": True,
        "close_fds": True,
        "umask": -1,
        "pipesize": -1,
        "process_group": None,
        "cwd": None,
        "env": None,
    }
    assert await output("echo", "ran", **defaults) == "ran"


async def test_unknown_keyword_is_a_type_error() -> None:
    unknown: dict[str, Any] = {"new_keyword": 1}
    with pytest.raises(TypeError, match="new_keyword"):
        await basyncio.create_subprocess_exec("true", **unknown)


async def test_wrong_types_are_type_errors() -> None:
    word: Any = 5
    for words in ((word,), ("true", word)):
        with pytest.raises(TypeError):
            await basyncio.create_subprocess_exec(*words)
    with pytest.raises(ValueError, match="cmd"):
        await basyncio.create_subprocess_shell(word)


async def test_stdout_cannot_be_the_target_of_stdout() -> None:
    with pytest.raises(ValueError, match="stderr"):
        await basyncio.create_subprocess_exec("true", stdout=basyncio.STDOUT)


# -- errors of a start -----------------------------------------------------------------------------------------------
async def test_missing_program_is_a_file_not_found_error() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await basyncio.create_subprocess_exec("no-such-program", stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert caught.value.filename == "no-such-program"
    assert "install it" in caught.value.__notes__[0]


async def test_file_without_execute_permission_is_a_permission_error(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError) as caught:
        await basyncio.create_subprocess_exec(tmp_path / "program", stdin=PIPE)
    assert caught.value.filename == tmp_path / "program"


async def test_missing_interpreter_is_a_file_not_found_error(tmp_path: Path) -> None:
    """The failure comes from exec() in the keeper."""
    (tmp_path / "program").write_text("#!/no/such/interpreter\n")
    (tmp_path / "program").chmod(0o755)
    with pytest.raises(FileNotFoundError):
        await basyncio.create_subprocess_exec(tmp_path / "program", stdin=PIPE, stdout=PIPE)


async def test_bad_cwd_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await basyncio.create_subprocess_exec("true", cwd=tmp_path / "missing")
    assert Path(caught.value.filename) == tmp_path / "missing"
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        await basyncio.create_subprocess_exec("true", cwd=tmp_path / "file")


async def test_closed_fd_is_an_os_error() -> None:
    for stream in ("stdin", "stdout", "stderr"):
        fds: dict[str, Any] = {stream: 999}
        with pytest.raises(OSError, match="Bad file descriptor"):
            await basyncio.create_subprocess_exec("true", **fds)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await basyncio.create_subprocess_exec("true", pass_fds=(999,))
