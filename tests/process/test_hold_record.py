"""Records of held processes: private, whole, and gone with their hold."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banksman import sockets
from banksman.errors import MachineError, NotFound
from banksman.folders import held_folder
from banksman.process import hold_record

RECORD = bytes(range(256))
LINE = RECORD[:11]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return held_folder()


@pytest.fixture
def hold() -> Iterator[Callable[[], str]]:
    """Listen like a keeper that holds a process. Return the name of the hold."""
    listeners: list[socket.socket] = []

    def listen() -> str:
        listener, path = sockets.listen_in(held_folder())
        listeners.append(listener)
        return path.name

    yield listen
    for listener in listeners:
        listener.close()


def test_record_is_read_by_its_name_until_it_is_removed(hold: Callable[[], str]) -> None:
    first, second = hold(), hold()
    hold_record.write(first, RECORD)
    hold_record.write(second, b"other")
    assert hold_record.read(first) == RECORD
    hold_record.remove(first)
    hold_record.remove(first)
    with pytest.raises(NotFound, match=first):
        hold_record.read(first)
    assert hold_record.read(second) == b"other"


def test_first_lines_are_those_of_the_holds_that_exist(hold: Callable[[], str], folder: Path) -> None:
    name = hold()
    hold_record.write(hold(), b"other")
    hold_record.write(name, RECORD)
    assert (name, LINE) in hold_record.first_lines()
    (folder / name).unlink()
    assert [line for _, line in hold_record.first_lines()] == [b"other"]


def test_first_lines_can_be_those_with_some_bytes(hold: Callable[[], str]) -> None:
    name = hold()
    hold_record.write(hold(), b"of another session")
    hold_record.write(name, b"of this session")
    assert list(hold_record.first_lines(b"this")) == [(name, b"of this session")]
    assert list(hold_record.first_lines(b"no session")) == []


def test_hold_whose_keeper_was_killed_has_no_first_line(folder: Path) -> None:
    listener, path = sockets.listen_in(folder, socket.SOCK_SEQPACKET)
    hold_record.write(path.name, RECORD)
    assert list(hold_record.first_lines()) == [(path.name, LINE)]
    listener.close()
    assert path.exists()
    assert list(hold_record.first_lines()) == []


def test_record_is_readable_by_its_user_only(hold: Callable[[], str], folder: Path) -> None:
    hold_record.write(hold(), RECORD)
    (path,) = folder.glob(f"*{hold_record.SUFFIX}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_record_is_not_read_through_a_link(hold: Callable[[], str], folder: Path, tmp_path: Path) -> None:
    name = hold()
    (tmp_path / "elsewhere").write_bytes(RECORD)
    (folder / name).with_suffix(hold_record.SUFFIX).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotFound):
        hold_record.read(name)


def test_write_removes_the_records_of_holds_that_are_over(hold: Callable[[], str], folder: Path) -> None:
    over, held = hold(), hold()
    hold_record.write(over, RECORD)
    hold_record.write(held, RECORD)
    (folder / over).unlink()
    hold_record.write(hold(), RECORD)
    assert hold_record.read(held) == RECORD
    with pytest.raises(NotFound):
        hold_record.read(over)


def test_write_names_the_folder_when_the_record_cannot_be_written(folder: Path) -> None:
    with pytest.raises(MachineError, match="cannot write the record"):
        hold_record.write(f"x{sockets.SUFFIX}", RECORD)
    assert not folder.exists()


def test_record_of_a_hold_is_opened_once_however_many_holds_are_looked_for(
    hold: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [hold() for _ in range(20)]
    for number, name in enumerate(names):
        hold_record.write(name, b"of %d." % number)
    opened: list[str] = []
    read = hold_record._read_line  # pyright: ignore[reportPrivateUsage]

    def count(path: str) -> tuple[int, bytes]:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(hold_record, "_read_line", count)
    for number, name in enumerate(names):
        assert list(hold_record.first_lines(b" %d." % number)) == [(name, b"of %d." % number)]
    assert len(opened) == len(names)


def test_first_line_is_that_of_a_record_that_was_written_anew(hold: Callable[[], str]) -> None:
    name = hold()
    hold_record.write(name, b"this, 1\nrow")
    assert list(hold_record.first_lines(b"this")) == [(name, b"this, 1\n")]
    hold_record.write(name, b"this, 2\nrow")
    assert list(hold_record.first_lines(b"this")) == [(name, b"this, 2\n")]
    assert hold_record.first_line(name) == b"this, 2\n"
