"""`banksman token`: create, list and revoke tokens in the state folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.thorough import one_in


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "banksman", "token", *words]
    env = {**os.environ, "XDG_STATE_HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=60)


def test_token_is_shown_once_and_listed_until_it_is_revoked(tmp_path: Path) -> None:
    assert "no named tokens" in run(tmp_path, "list").stdout
    flags = ("--role", "asker", "--sessions", "alice-*,team", "--agents", "claude", "--expires", "30d")
    created = run(tmp_path, "create", "--name", "alice", *flags)
    assert (created.returncode, created.stderr) == (0, "")
    token = created.stdout.strip()
    assert token.startswith("bmt_")
    told = json.loads(run(tmp_path, "create", "--name", "bob", "--role", "viewer", "--json").stdout)
    assert told["name"] == "bob"
    listed = run(tmp_path, "list").stdout
    for word in ("alice", "asker", "alice-* team", "claude", "in 29 d", "bob", "viewer", "never"):
        assert word in listed, (word, listed)
    assert token not in run(tmp_path, "list", "--json").stdout
    (alice, _) = json.loads(run(tmp_path, "list", "--json").stdout)["tokens"]
    assert alice["expires"] - alice["created"] == pytest.approx(30 * 24 * 3600)
    assert run(tmp_path, "revoke", "--name", "alice").returncode == 0
    assert run(tmp_path, "list", "--format", "quiet").stdout == "bob\n"


@pytest.mark.parametrize(
    "words",
    one_in(
        4,
        [
            (("create", "--role", "asker"),),
            (("create", "--name", "a"),),
            (("create", "--name", "a b", "--role", "asker"),),
            (("create", "--name", "a", "--role", "king"),),
            (("create", "--name", "a", "--role", "asker", "--expires", "soon"),),
            # As by a variable of a shell that is empty. No limit would be every session.
            (("create", "--name", "a", "--role", "asker", "--sessions", ""),),
            (("create", "--name", "a", "--role", "asker", "--sessions", "a-*,,b"),),
            (("create", "--name", "a", "--role", "asker", "--agents", " , "),),
            (("revoke",),),
            (("revoke", "--name", "nobody"),),
            (("forget",),),
        ],
    ),
)
def test_wrong_usage_creates_no_token(tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = run(tmp_path, *words)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "banksman" in answer.stderr
    assert run(tmp_path, "list", "--format", "quiet").stdout == ""
