"""The profiles that come with the package, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from banksman.core.ladder import Timings
from banksman.errors import UsageError
from banksman.run.child import environment
from banksman.run.sessions import profiles

SMALLEST = 'command = ["x"]\ndialect = "claude"\n'


def test_every_profile_that_is_known_can_be_loaded() -> None:
    assert "claude" in profiles.names()
    for name in profiles.names():
        profile = profiles.load(name)
        assert profile.name == name
        assert ("steer" in profile.capabilities) == profile.dialect.can_steer
        assert profile.install


def test_claude() -> None:
    claude = profiles.load("claude")
    assert claude.command == ("claude",)
    assert claude.dialect.name == "claude"
    # It needs up to 2.0 s to end its tools; a KILL before that orphans them.
    assert claude.timings.grace >= 2.5
    assert claude.timings.eof is not None
    assert claude.clocks["start"] == 60.0
    assert claude.scrub == ("nesting",)
    assert "resume" in claude.capabilities


def test_the_nesting_variables_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDECODE", "1")
    monkeypatch.setenv("BANKSMAN_TEST_KEPT", "1")
    built = environment.build(None, inherit=True, scrub=profiles.load("claude").scrub)
    assert b"CLAUDECODE" not in built
    assert b"BANKSMAN_TEST_KEPT" in built


@pytest.mark.parametrize("name", ["clod", "", "../claude", "claude.toml", "/etc/passwd", "claude\0"])
def test_an_unknown_agent_is_told_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UsageError, match="there is no agent") as caught:
        profiles.load(name)
    assert "claude" in caught.value.hint
    assert caught.value.ids == {"agent": name}


def test_a_file_of_the_callers_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SMALLEST + "[ladder]\ngrace = 3\n[clocks]\noverall = 0.5\n")
    mine = profiles.load_file(file)
    assert (mine.name, mine.title, mine.command) == ("mine", "mine", ("x",))
    assert mine.timings == Timings(grace=3.0)
    assert dict(mine.clocks) == {"overall": 0.5}
    assert mine.capabilities == frozenset()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = [", "mine.toml is not TOML"),
        ('dialect = "claude"', "command cannot be None"),
        ('command = []\ndialect = "claude"', r"command cannot be \[\]"),
        ('command = "x"\ndialect = "claude"', "command cannot be 'x'"),
        ('command = ["x", 1]\ndialect = "claude"', "command cannot be"),
        ('command = [""]\ndialect = "claude"', "command cannot be"),
        ('command = ["x"]', "dialect cannot be None .one of: claude"),
        ('command = ["x"]\ndialect = "klingon"', "dialect cannot be 'klingon' .one of: claude"),
        ('command = ["x"]\ndialect = 5', "dialect cannot be 5"),
        (SMALLEST + "colour = 1", "there is no key colour .known are: capabilities"),
        (SMALLEST + "[ladder]\ngrease = 1", "there is no key ladder.grease .known are: drain, eof_grace"),
        (SMALLEST + "[clocks]\nsundial = 1", "there is no key clocks.sundial"),
        (SMALLEST + "[env]\nscrap = []", "there is no key env.scrap"),
        (SMALLEST + "ladder = 5", "ladder cannot be 5"),
        (SMALLEST + "[ladder]\ngrace = -1", "ladder.grace cannot be -1"),
        (SMALLEST + "[ladder]\ngrace = true", "ladder.grace cannot be True"),
        (SMALLEST + "[ladder]\neof_grace = inf", "ladder.eof_grace cannot be inf"),
        (SMALLEST + "[ladder]\nlinger = nan", "ladder.linger cannot be nan"),
        (SMALLEST + '[clocks]\nstart = "soon"', "clocks.start cannot be 'soon'"),
        (SMALLEST + 'capabilities = ["fly"]', "capabilities cannot hold 'fly'"),
        (SMALLEST + 'scrub = ["nesting"]', "there is no key scrub"),
        (SMALLEST + "[env]\nscrub = 'nesting'", "env.scrub cannot be 'nesting'"),
        (SMALLEST + "title = 5", "title cannot be 5"),
    ],
)
def test_a_wrong_file_says_which_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        profiles.load_file(file)
    assert str(file) in str(caught.value)
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        profiles.load_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'title = "\xff"')
    with pytest.raises(UsageError, match="not UTF-8"):
        profiles.load_file(tmp_path / "latin.toml")
