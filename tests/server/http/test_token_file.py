"""Token file: made once, private, and shared by servers that start together. An unsafe file is refused."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from banksman.errors import UsageError
from banksman.server.http import token_file

SERVER = """
import os, sys
from pathlib import Path
from banksman.server.http import token_file as token
os.write(1, b"!")
sys.stdin.buffer.read(1)
os.write(1, token.load_or_make(Path(sys.argv[1])).encode())
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_token_file_is_made_once_and_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "state" / "banksman" / "token"
    umask = os.umask(0o277)
    try:
        made = token_file.load_or_make(path)
    finally:
        os.umask(umask)
    assert len(made) == 43
    assert mode(path) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]
    assert token_file.load_or_make(path) == made
    assert token_file.load_or_make(tmp_path / "other" / "token") != made


def test_token_file_folders_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        token_file.load_or_make(tmp_path / "state" / "banksman" / "token")
    finally:
        os.umask(umask)
    assert [mode(tmp_path / "state"), mode(tmp_path / "state" / "banksman")] == [0o700, 0o700]


def test_token_file_is_agreed_on_by_servers_starting_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.read(1) == "!"
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("x")
        server.stdin.flush()
    said = [server.communicate()[0] for server in servers]
    assert len(said[0]) == 43
    assert said == [said[0]] * 6
    assert path.read_text() == f"{said[0]}\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


@pytest.mark.parametrize("comes_first", [False, True])
def test_token_file_works_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_first: bool) -> None:
    """A file system without hard links reports EPERM. None is available here, so this one call raises it."""
    path = tmp_path / "token"

    def link(*_: object) -> None:
        if comes_first:
            path.write_text("theirs")
            path.chmod(0o600)
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    made = token_file.load_or_make(path)
    assert path.read_text().strip() == made
    assert (made == "theirs") is comes_first
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_token_file_of_the_user_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"my-own~token\r\n")
    path.chmod(0o600)
    assert token_file.load_or_make(path) == "my-own~token"


def _link(path: Path) -> None:
    path.with_name("target").write_text("token")
    path.with_name("target").chmod(0o600)
    path.symlink_to("target")


def _write(data: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)
        path.chmod(mode)

    return write


def _give_away(path: Path) -> None:
    _write(b"token")(path)
    os.chown(path, 12345, -1)


def _loosen_folder(path: Path) -> None:
    _write(b"token")(path)
    path.parent.chmod(0o770)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        pytest.param(_write(b"token", 0o640), "is readable by other users", id="group"),
        pytest.param(_write(b"token", 0o602), "is readable by other users", id="others"),
        pytest.param(_write(b""), "is empty", id="empty"),
        pytest.param(_write(b" \n"), "is empty", id="blank"),
        pytest.param(_write(b"x" * 4097), "longer than 4096 bytes", id="long"),
        pytest.param(_write(b"to ken"), "that a header cannot hold", id="a blank inside"),
        pytest.param(_write("tök".encode()), "that a header cannot hold", id="no ASCII"),
        pytest.param(_write(b"a\nb"), "that a header cannot hold", id="two lines"),
        pytest.param(_write(b"a\0"), "that a header cannot hold", id="a zero"),
        pytest.param(_link, "is a symbolic link", id="a link"),
        pytest.param(Path.mkdir, "is not a regular file", id="a folder"),
        pytest.param(os.mkfifo, "is not a regular file", id="a pipe"),
        pytest.param(_give_away, "belongs to user 12345", id="of another user"),
        pytest.param(_loosen_folder, "other users can replace files", id="in a loose folder"),
    ],
)
def test_token_file_that_cannot_be_secret_is_refused(tmp_path: Path, prepare: Callable[[Path], None], why: str) -> None:
    if prepare is _give_away and os.geteuid():
        pytest.skip("only root can give a file away")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    prepare(folder / "token")
    before = sorted(entry.name for entry in folder.iterdir())
    with pytest.raises(UsageError, match=why) as caught:
        token_file.load_or_make(folder / "token")
    assert caught.value.hint
    assert sorted(entry.name for entry in folder.iterdir()) == before


def test_token_file_of_maximum_length_is_accepted(tmp_path: Path) -> None:
    _write(b"x" * 4096)(tmp_path / "token")
    assert token_file.load_or_make(tmp_path / "token") == "x" * 4096


def test_token_file_in_impossible_folder_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot store the token") as caught:
        token_file.load_or_make(tmp_path / "file" / "token")
    assert "token_file" in caught.value.hint


def test_token_file_default_path_follows_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert token_file.default_path() == tmp_path / "banksman" / "token"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert token_file.default_path() == tmp_path / "home" / ".local" / "state" / "banksman" / "token"
    monkeypatch.setenv("HOME", "/")
    with pytest.raises(UsageError, match="no home folder"):
        token_file.default_path()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("abc", "abc", True),
        ("abc", "abd", False),
        ("abc", "ab", False),
        ("", "", True),
        ("", "a", False),
        ("é", "é", True),
        ("é", "e\u0301", False),
        pytest.param("\ud800", "\ud800", True, id="the same half"),
        pytest.param("\ud800", "\ud801", False, id="two halves"),
        pytest.param("x" * 100_000, "x" * 100_000, True, id="long"),
        ("a\0b", "a\0c", False),
    ],
)
def test_token_comparison_accepts_any_two_texts(a: str, b: str, same: bool) -> None:
    assert token_file.is_same(a, b) is same
