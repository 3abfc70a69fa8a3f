"""The file of named tokens: create, revoke, expire, and refuse a file that cannot be trusted."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from banksman.errors import UsageError
from banksman.server.access import named_tokens
from banksman.server.access.named_tokens import NamedTokens
from banksman.server.access.roles import Caller, Role


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "named-tokens.json"


def test_token_names_its_caller_until_it_is_revoked(path: Path) -> None:
    server = NamedTokens(path)
    assert server.caller_of("bmt_x") is None
    token = named_tokens.create(path, "alice", Role.ASKER, sessions=["a-*"], agents=["claude"])
    other = named_tokens.create(path, "bob", Role.VIEWER)
    assert server.caller_of(token) == Caller("alice", Role.ASKER, ("a-*",), ("claude",))
    assert server.caller_of(other) == Caller("bob", Role.VIEWER)
    for wrong in (token[:-1], f"{token}x", token.removeprefix("bmt_"), "", "bmt_", "bmt_\udcff"):
        assert server.caller_of(wrong) is None
    assert token.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    named_tokens.revoke(path, "alice")
    assert server.caller_of(token) is None
    assert server.caller_of(other) is not None
    path.unlink()
    assert server.caller_of(other) is None


def test_name_has_one_token_at_a_time(path: Path) -> None:
    named_tokens.create(path, "alice", Role.ASKER)
    with pytest.raises(UsageError, match="has one already"):
        named_tokens.create(path, "alice", Role.ADMIN)
    with pytest.raises(UsageError, match="has none"):
        named_tokens.revoke(path, "bob")
    named_tokens.revoke(path, "alice")
    named_tokens.create(path, "alice", Role.VIEWER, seconds=0.0)
    # An expired token does not keep its name.
    named_tokens.create(path, "alice", Role.OPERATOR)
    assert [token.role for token in named_tokens.read(path)] == [Role.OPERATOR]


def test_expired_token_has_no_caller(path: Path) -> None:
    token = named_tokens.create(path, "alice", Role.ASKER, seconds=0.0)
    assert NamedTokens(path).caller_of(token) is None
    token = named_tokens.create(path, "bob", Role.ASKER, seconds=3600.0)
    assert NamedTokens(path).caller_of(token) is not None


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 65, "a\n", "ä", "a/b"])
def test_odd_name_is_refused(path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot have the name"):
        named_tokens.create(path, name, Role.ASKER)


def test_file_that_cannot_be_trusted_admits_no_token(path: Path) -> None:
    token = named_tokens.create(path, "alice", Role.ADMIN)
    good = path.read_bytes()
    path.chmod(0o640)
    assert NamedTokens(path).caller_of(token) is None
    path.chmod(0o600)
    server = NamedTokens(path)
    assert server.caller_of(token) is not None
    odd = (good.replace(b'"hash": "', b'"hash": "' + "é".encode()), good.replace(b'"role": "admin"', b'"role": "king"'))
    for data in (b"", b"{}", good[:-20], good.replace(b'"version": 1', b'"version": 2'), b"\xff", *odd):
        path.write_bytes(data)
        assert server.caller_of(token) is None, data
        with pytest.raises(UsageError):
            named_tokens.create(path, "bob", Role.VIEWER)
    path.write_bytes(good)
    assert server.caller_of(token) is not None
    real = path.rename(path.with_name("real"))
    path.symlink_to(real)
    assert server.caller_of(token) is None


def test_file_that_cannot_be_trusted_is_reported_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = named_tokens.create(path, "alice", Role.ADMIN)
    server = NamedTokens(path)

    def warned() -> int:
        return sum("named tokens are refused" in record.message for record in caplog.records)

    path.chmod(0o640)
    assert [server.caller_of(token) for _ in range(3)] == [None] * 3
    assert warned() == 1
    path.write_bytes(b"{}")
    assert [server.caller_of(token) for _ in range(3)] == [None] * 3
    assert warned() == 2


@pytest.mark.parametrize(
    ("pattern", "included", "excluded"),
    [
        ("alice-*", ["alice-", "alice-1", "alice-a\nb", "alice-*"], ["alice", "Alice-1", "x-alice-1", None]),
        # Only the star is special, as the help says.
        ("team[1]", ["team[1]"], ["team1"]),
        ("[!a]*", ["[!a]b"], ["b", "team"]),
        ("who?", ["who?"], ["whom"]),
        (".*", [".x"], ["x"]),
        ("*a" * 50, ["xa" * 50], ["a" * 49, "b" * 200]),
    ],
)
def test_pattern_has_the_star_as_its_only_special_character(
    pattern: str, included: list[str], excluded: list[str | None]
) -> None:
    caller = Caller("alice", Role.ASKER, (pattern,))
    assert [caller.has_in_scope(name, "claude") for name in included] == [True] * len(included)
    assert [caller.has_in_scope(name, "claude") for name in excluded] == [False] * len(excluded)


def _create(path: Path, name: str) -> None:
    named_tokens.create(path, name, Role.VIEWER)


def test_processes_that_create_tokens_at_once_lose_none(path: Path) -> None:
    names = [f"n{number}" for number in range(8)]
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_create, args=(path, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(token.name for token in named_tokens.read(path)) == names
