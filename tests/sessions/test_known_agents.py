"""Agent profiles: those of the package, those of users, and the errors for invalid ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from banksman import Host
from banksman.core.dialects.dialect import ERROR_CHARACTERS_MAX, Quirks
from banksman.core.stop_ladder import Timings
from banksman.errors import UsageError
from banksman.process import launch
from banksman.sessions import arguments, known_agents
from banksman.sessions.containment import Containment
from banksman.sessions.profile import QUIET_SECONDS_MAX

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "core" / "dialects" / "recordings"
SMALLEST = 'command = ["x"]\ndialect = "claude"\n'
OURS = [
    *("claude", "claude-agent-acp", "codex", "codex-acp", "codex-acp-ts", "copilot", "custom", "gemini", "goose"),
    *("kimi", "opencode", "qwen"),
]
# The recording of each agent.
SPOKE = {
    "claude-agent-acp": "acp-claude-agent-acp-basic",
    "codex-acp": "acp-codex-acp-zed-basic",
    "codex-acp-ts": "acp-codex-acp-new-basic",
    "copilot": "acp-copilot-basic",
    "gemini": "acp-gemini-load",
    "goose": "acp-goose-basic",
    "kimi": "acp-kimi-basic",
    "opencode": "acp-opencode-basic",
    "qwen": "acp-qwen-basic",
}


@pytest.fixture(autouse=True)
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary profile folder, instead of that of the real user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "banksman" / "agents"
    folder.mkdir(parents=True)
    return folder


# -- profiles of the package -----------------------------------------------------------------------------------------
def test_builtin_profiles_load() -> None:
    assert known_agents.names() == OURS
    for name in OURS:
        profile = known_agents.load(name)
        assert profile.name == name
        assert profile.source is None
        assert ("steer" in profile.capabilities) == profile.dialect.can_steer
        assert bool(profile.install) == bool(profile.command)
        assert profile.website.startswith("https://")
        assert profile.capabilities >= {"images", "interrupt", "questions", "resume"}
        assert profile.scrub == ("nesting", "secrets")
        assert all(launch.may_be_secret(name) for name in profile.keep)
        assert {name for name in profile.account if launch.may_be_secret(name)} <= set(profile.keep)
        assert profile.clocks["start"] >= 60.0
        # A turn that hangs must not block its queue forever, and a slow one must not be cut off.
        assert (profile.clocks["bytes"], profile.clocks["progress"]) == (1800.0, 7200.0)


def test_claude_profile_has_expected_values() -> None:
    claude = known_agents.load("claude")
    assert claude.command == ("claude",)
    assert claude.dialect.name == "claude"
    # The agent needs up to 2.0 s to end its tools. A KILL before that would orphan them.
    assert claude.timings.grace >= 2.5
    assert claude.timings.eof is not None
    assert claude.clocks["start"] == 60.0
    assert claude.quiet_seconds == 0.0
    assert not claude.leaves_tools


@pytest.mark.parametrize(
    ("name", "grace", "waits_for_eof"),
    [
        # The measured time after TERM, and whether the end of stdin has any effect.
        ("claude-agent-acp", 5.1 + 2.0, True),
        ("codex", 5.0, True),
        ("codex-acp-ts", 5.0, True),
        ("copilot", 2.35, True),
        ("gemini", 0.82, True),
        ("goose", 0.0, False),
        ("codex-acp", 0.06, False),
        ("kimi", 0.11, True),
        ("qwen", 0.82, True),
        ("opencode", 0.12, True),
        ("custom", 5.1, True),
    ],
)
def test_profile_allows_time_the_agent_needs_to_stop(name: str, grace: float, waits_for_eof: bool) -> None:
    timings = known_agents.load(name).timings
    assert timings.grace > grace
    assert (timings.eof is not None) is waits_for_eof


def test_profiles_record_leftover_tools_and_quirks() -> None:
    found = {name: known_agents.load(name) for name in OURS}
    assert {name for name in OURS if not found[name].leaves_tools} == {"claude", "claude-agent-acp", "gemini"}
    assert {name for name in OURS if found[name].quirks.cancel_may_say} == {"goose", "opencode"}
    assert {name for name in OURS if found[name].quirks.silence_is_error} == {"codex-acp-ts", "kimi"}
    assert {name for name in OURS if found[name].quirks.error_texts} == {"codex-acp-ts", "copilot", "goose"}
    assert {name for name in OURS if found[name].quiet_seconds} == {"codex-acp", "custom", "kimi"}
    assert all(profile.after_interrupt == "sweep" for profile in found.values())
    assert all(profile.quirks.serves == ("fs", "terminal") for profile in found.values())


def frames(recording: str) -> list[tuple[str, float, Any]]:
    lines = (RECORDINGS / f"{recording}.jsonl").read_text(encoding="utf-8").splitlines()
    said = ((line["d"], line["t"], line["v"]) for line in map(json.loads, lines))
    return [(way, at, value) for way, at, value in said if way == "argv" or isinstance(value, dict)]


@pytest.mark.parametrize("name", SPOKE)
def test_profile_capabilities_match_recorded_handshake(name: str) -> None:
    """Check the command, and exactly the capabilities that the handshake shows."""
    profile = known_agents.load(name)
    (argv,) = (value for way, _, value in frames(SPOKE[name]) if way == "argv")
    assert tuple(argv[: len(profile.command)]) == profile.command
    results = [value["result"] for way, _, value in frames(SPOKE[name]) if way == "out" and "result" in value]
    (said,) = (result["agentCapabilities"] for result in results if "agentCapabilities" in result)
    (opened,) = (result for result in results if "modes" in result or "configOptions" in result)
    sessions = said.get("sessionCapabilities", {})
    options = {option.get("category") for option in opened.get("configOptions") or ()}
    told = {
        "images": said["promptCapabilities"]["image"],
        "resume": said["loadSession"] or "resume" in sessions,
        "fork": "fork" in sessions,
        "system_prompt": "systemPrompt" in sessions,
        "model": bool(opened.get("models")) or "model" in options,
        "permission_mode": bool(opened.get("modes")) or "mode" in options,
    }
    assert {capability for capability, can in told.items() if can} == profile.capabilities & set(told)


def test_quirks_match_recorded_texts() -> None:
    texts = [
        value["params"]["update"]["content"]["text"]
        for way, _, value in frames("acp400-copilot")
        if way == "out" and value.get("params", {}).get("update", {}).get("sessionUpdate") == "agent_message_chunk"
    ]
    copilot = known_agents.load("copilot").quirks
    # The agent also announces retries, which are not an end. Only the first text is a final error.
    assert [copilot.has_failed(text) for text in texts] == [True, False, False, False, False, False]
    assert copilot.has_failed("".join(reversed(texts)))
    assert not copilot.has_failed("The log says Error: 400")
    warning = next(
        value["params"]["update"]["content"]["text"]
        for way, _, value in frames("acp-codex-acp-new-basic")
        if way == "out" and "Model metadata" in json.dumps(value)
    )
    adapter = known_agents.load("codex-acp-ts").quirks
    assert adapter.has_failed(warning)
    assert not adapter.has_failed(f"{warning}hello")
    goose = known_agents.load("goose").quirks
    assert goose.has_failed("Ran into this error: Request failed: 400.\n\nPlease retry if you think …")
    assert not goose.has_failed("I ran into this error: it was yours")


def test_quiet_window_exceeds_recorded_delays() -> None:
    """Each turn of the recording is followed by one more update, before the next prompt is sent."""
    late: list[float] = []
    ended: float | None = None
    for way, at, value in frames("acp-kimi-basic"):
        if way == "in" and value.get("method") == "session/prompt":
            ended = None
        elif way == "out" and "stopReason" in (value.get("result") or {}):
            ended = at
        elif way == "out" and value.get("method") == "session/update" and ended is not None:
            late.append(at - ended)
    assert len(late) == 5
    assert max(late) * 10 < known_agents.load("kimi").quiet_seconds


def test_long_text_is_not_taken_for_error_message() -> None:
    quirks = Quirks(error_texts=("^Error",))
    assert quirks.has_failed("Error".ljust(ERROR_CHARACTERS_MAX))
    assert not quirks.has_failed("Error".ljust(ERROR_CHARACTERS_MAX + 1))
    assert not Quirks().has_failed("Error")


def test_nesting_variables_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDECODE", "1")
    monkeypatch.setenv("BANKSMAN_TEST_KEPT", "1")
    built = launch.build(None, inherit=True, scrub=known_agents.load("claude").scrub)
    assert b"CLAUDECODE" not in built
    assert b"BANKSMAN_TEST_KEPT" in built


def test_custom_profile_reports_missing_command() -> None:
    custom = known_agents.load("custom")
    assert custom.command == ()
    with pytest.raises(
        UsageError, match=r"cannot start the agent 'custom': its profile has no command \(pass command="
    ):
        custom.own_command()
    assert known_agents.load("gemini").own_command() == ("gemini", "--acp")


@pytest.mark.parametrize("name", ["clod", "", "../claude", "claude.toml", "/etc/passwd", "claude\0", "x" * 300])
def test_unknown_agent_error_lists_known_agents(name: str) -> None:
    with pytest.raises(UsageError, match="there is no agent") as caught:
        known_agents.load(name)
    assert "claude" in caught.value.hint
    assert caught.value.ids == {"agent": name}


@pytest.mark.parametrize("agent", [5, None, ["claude"], b"claude"])
async def test_agent_that_is_not_a_name_is_usage_error(agent: Any) -> None:
    async with Host("memory:") as host:
        with pytest.raises(UsageError) as caught:
            await host.open(agent)
    assert str(caught.value) == f"agent cannot be {agent!r} (pass a name; see banksman agents)"


# -- contents of a file ----------------------------------------------------------------------------------------------
def test_profile_file_of_caller_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SMALLEST + "[ladder]\ngrace = 3\n[clocks]\noverall = 0.5\n")
    mine = known_agents.load_file(file)
    assert (mine.name, mine.title, mine.command) == ("mine", "mine", ("x",))
    assert mine.source == str(file)
    assert mine.timings == Timings(grace=3.0)
    assert dict(mine.clocks) == {"bytes": 1800.0, "progress": 7200.0, "overall": 0.5}
    assert mine.capabilities == frozenset()
    assert (mine.quiet_seconds, mine.after_interrupt, mine.leaves_tools) == (0.0, "sweep", False)
    assert mine.quirks == Quirks()
    assert dict(mine.variables) == {}
    assert mine.repairs() == []


def test_profile_turns_a_watchdog_off_with_zero(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SMALLEST + "[clocks]\nbytes = 0\nprogress = 60\n")
    assert dict(known_agents.load_file(file).clocks) == {"progress": 60.0}


def test_docs_example_profile_uses_every_key(users: Path) -> None:
    """The profile reads all keys of the example, and the example has all keys except those that `extends` adds."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (users / "house-agent.toml").write_text(example)
    agent = known_agents.load("house-agent")
    assert (agent.title, agent.command) == ("The house's agent", ("house-agent", "--acp"))
    assert agent.dialect.name == "acp"
    assert agent.capabilities == {"interrupt", "questions", "resume"}
    assert (agent.drain_seconds, agent.quiet_seconds, agent.after_interrupt) == (5.0, 0.1, "sweep")
    assert agent.timings == Timings(eof=1.0, grace=5.0, linger=0.3, drain=2.0)
    assert dict(agent.clocks) == {"start": 60.0, "bytes": 1800.0, "progress": 7200.0}
    assert (agent.scrub, agent.keep) == (("nesting", "secrets"), ("HOUSE_AGENT_KEY",))
    assert dict(agent.variables) == {"HOUSE_AGENT_TELEMETRY": "off"}
    assert agent.containment == Containment(
        user="agent", limits={"nofile": 1024}, wrap="bwrap", on_open=("make-place", "{cwd}")
    )
    assert agent.quirks == Quirks(cancel_may_say=("end_turn",), error_texts=("^API error: ",), silence_is_error=True)
    assert agent.leaves_tools
    assert agent.note == "what else a person should know"
    assert agent.install == "pipx install house-agent"
    assert len(agent.repairs()) == 5


def test_docs_name_every_agent() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| (\w+) \|[^|]*\|$", text, re.MULTILINE))
    assert rows == {name: known_agents.load(name).dialect.name for name in OURS}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = [", "cannot parse .*mine.toml as TOML"),
        ("x = " + "[" * 5000, "cannot parse .*mine.toml as TOML"),
        ('dialect = "claude"', "command cannot be None"),
        ('command = "x"\ndialect = "claude"', "command cannot be 'x'"),
        ('command = ["x", 1]\ndialect = "claude"', "command cannot be"),
        ('command = [""]\ndialect = "claude"', "command cannot be"),
        ('command = ["x"]', "dialect cannot be None .use one of: acp, claude, codex"),
        ('command = ["x"]\ndialect = "klingon"', "dialect cannot be 'klingon' .use one of: acp, claude, codex"),
        ('command = ["x"]\ndialect = 5', "dialect cannot be 5"),
        (SMALLEST + "comand = 1", "there is no key comand .do you mean command. known keys: after_interrupt, cap"),
        (
            SMALLEST + "[ladder]\ngrease = 1",
            "there is no key ladder.grease .do you mean ladder.grace. known keys: drain",
        ),
        (SMALLEST + "[clocks]\nsundial = 1", "there is no key clocks.sundial"),
        (SMALLEST + "[env]\nscrap = []", "there is no key env.scrap .do you mean env.scrub"),
        (SMALLEST + "ladder = 5", "ladder cannot be 5"),
        (SMALLEST + "[ladder]\ngrace = -1", "ladder.grace cannot be -1"),
        (SMALLEST + "[ladder]\ngrace = true", "ladder.grace cannot be True"),
        (SMALLEST + "[ladder]\neof_grace = inf", "ladder.eof_grace cannot be inf"),
        (SMALLEST + "[ladder]\nlinger = nan", "ladder.linger cannot be nan"),
        (SMALLEST + '[clocks]\nstart = "soon"', "clocks.start cannot be 'soon'"),
        (SMALLEST + 'capabilities = ["fly"]', "capabilities cannot hold 'fly'"),
        (SMALLEST + 'scrub = ["nesting"]', "there is no key scrub"),
        (SMALLEST + "[env]\nscrub = 'nesting'", "env.scrub cannot be 'nesting'"),
        (SMALLEST + "[env]\nset = ['A=b']", r"env.set cannot be \['A=b'\] .use a table: .env.set"),
        (SMALLEST + "[env.set]\nA = 5", "env.set.A cannot be 5"),
        (SMALLEST + "[env.set]\n'A=B' = 'c'", "env.set: env cannot hold the variable 'A=B'"),
        (SMALLEST + "title = 5", "title cannot be 5"),
        (SMALLEST + "website = []", r"website cannot be \[\]"),
        (SMALLEST + "quiet_seconds = -0.1", "quiet_seconds cannot be -0.1"),
        (SMALLEST + f"quiet_seconds = {QUIET_SECONDS_MAX + 0.1}", "quiet_seconds cannot be 5.1 .use at most 5"),
        (SMALLEST + 'after_interrupt = "kill"', "after_interrupt cannot be 'kill' .use one of: keep, sweep"),
        (SMALLEST + "quirks = true", "quirks cannot be True"),
        (SMALLEST + "[quirks]\nleaves_tool = true", "no key quirks.leaves_tool .do you mean quirks.leaves_tools"),
        (SMALLEST + "[quirks]\nleaves_tools = 1", "quirks.leaves_tools cannot be 1 .use true or false"),
        (SMALLEST + "[quirks]\nsilence_is_error = 'no'", "quirks.silence_is_error cannot be 'no'"),
        (SMALLEST + "[quirks]\ncancel_may_say = 'end_turn'", "quirks.cancel_may_say cannot be 'end_turn'"),
        (SMALLEST + "[quirks]\nserves = ['ftp']", "quirks.serves cannot hold 'ftp' .use one of: fs, terminal"),
        (SMALLEST + "[quirks]\nerror_texts = ['(']", "quirks.error_texts cannot hold '.' .it is not a pattern"),
        (SMALLEST + "[quirks]\nerror_texts = ['(?=a)']", "error_texts cannot hold .* cannot be matched in bounded"),
        (SMALLEST + "[quirks]\nnote = 1", "quirks.note cannot be 1"),
        ('extends = "mine"', "extends cannot be 'mine' .use a profile of the package: claude, "),
        ("extends = 5", "extends cannot be 5"),
        ('extends = "../claude"', "extends cannot be '../claude'"),
        ('extends = "custom"\nladder = 5', "ladder cannot be 5"),
        ('extends = "custom"\n[ladder]\ngrease = 1', "there is no key ladder.grease"),
    ],
)
def test_invalid_profile_error_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        known_agents.load_file(file)
    assert str(file) in str(caught.value)
    assert caught.value.hint
    assert caught.value.ids == {"agent": "mine"}


def test_unreadable_profile_file_is_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        known_agents.load_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'title = "\xff"')
    with pytest.raises(UsageError, match="not UTF-8"):
        known_agents.load_file(tmp_path / "latin.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        known_agents.load_file(tmp_path / "folder.toml")
    # The FIFO has no writer, and the load must not wait for one.
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        known_agents.load_file(tmp_path / "pipe.toml")
    (tmp_path / "unspeakable name.toml").write_text(SMALLEST)
    with pytest.raises(UsageError, match="as a profile: its name is not a valid agent name"):
        known_agents.load_file(tmp_path / "unspeakable name.toml")


def test_profile_file_size_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.write_text(SMALLEST + "#".ljust(known_agents.FILE_BYTES_MAX - len(SMALLEST)))
    assert known_agents.load_file(file).command == ("x",)
    with file.open("a") as more:
        more.write("#")
    with pytest.raises(UsageError, match="larger than 262144 bytes"):
        known_agents.load_file(file)


# -- profiles of users -----------------------------------------------------------------------------------------------
def test_user_profile_is_known_by_its_file_name(users: Path) -> None:
    (users / "mine.toml").write_text('extends = "custom"\ncommand = ["mine"]\n')
    assert known_agents.names() == sorted([*OURS, "mine"])
    mine = known_agents.load("mine")
    # The title is the profile's name, not the title of the profile that it extends.
    assert (mine.name, mine.title, mine.command, mine.source) == ("mine", "mine", ("mine",), str(users / "mine.toml"))
    assert mine.leaves_tools


def test_user_profile_overrides_builtin_and_may_extend_it(users: Path) -> None:
    ours = known_agents.load("gemini")
    (users / "gemini.toml").write_text('extends = "gemini"\n[ladder]\ngrace = 9\n[quirks]\nserves = []\n')
    mine = known_agents.load("gemini")
    assert (mine.title, mine.command, mine.capabilities) == (ours.title, ours.command, ours.capabilities)
    # The override works key by key: the other numbers of the ladder come from the package.
    assert mine.timings == Timings(eof=ours.timings.eof, grace=9.0)
    assert mine.quirks.serves == ()
    assert mine.note == ours.note
    assert known_agents.names() == OURS


def test_extends_accepts_only_builtin_profiles(users: Path) -> None:
    """So there can be no cycle, and `extends` never means a user's `custom`."""
    (users / "custom.toml").write_text('extends = "custom"\ntitle = "mine"\n[clocks]\nstart = 7\n')
    (users / "other.toml").write_text('extends = "custom"\ncommand = ["x"]\n')
    assert known_agents.load("custom").clocks["start"] == 7.0
    assert known_agents.load("other").clocks["start"] == 120.0


def test_invalid_user_profile_breaks_only_that_agent(users: Path) -> None:
    (users / "bad.toml").write_text(SMALLEST + "colour = 1")
    (users / "gemini.toml").write_text('extends = "gemini"\n[ladder]\ngrace = "long"')
    (users / "unspeakable name.toml").write_text(SMALLEST)
    (users / ".#mine.toml").write_text("an editor's")
    (users / "notes.txt").write_text("no profile")
    assert known_agents.names() == sorted([*OURS, "bad", "unspeakable name"])
    with pytest.raises(UsageError, match=r"bad\.toml: there is no key colour"):
        known_agents.load("bad")
    with pytest.raises(UsageError, match=r"gemini\.toml: ladder\.grace cannot be 'long'"):
        known_agents.load("gemini")
    with pytest.raises(UsageError, match="is not a valid agent name"):
        known_agents.load("unspeakable name")
    assert known_agents.load("qwen").source is None
    # Its sessions can still be read: with the package's profile, or with a plain one.
    assert known_agents.load_or_plain("gemini").dialect.name == "acp"
    assert known_agents.load_or_plain("bad").name == "bad"
    looked = {each.name: each for each in known_agents.find_agents()}
    assert {name for name, each in looked.items() if each.error} == {"bad", "gemini", "unspeakable name"}
    assert [name for name, each in looked.items() if each.overrides] == ["gemini"]


def test_missing_or_invalid_profile_folder_has_no_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("nowhere", "a-file", "relative"):
        if home == "a-file":
            (tmp_path / "a-file" / "banksman").mkdir(parents=True)
            (tmp_path / "a-file" / "banksman" / "agents").write_text("no folder")
        monkeypatch.setenv("XDG_CONFIG_HOME", home if home == "relative" else str(tmp_path / home))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert known_agents.names() == OURS
    # A relative path is ignored, as the XDG specification says. The user's home counts instead.
    folder = tmp_path / "home" / ".config" / "banksman" / "agents"
    assert known_agents.user_folder() == folder
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(SMALLEST)
    assert "mine" in known_agents.names()


# -- on this machine -------------------------------------------------------------------------------------------------
def test_find_agents_finds_programs_as_a_shell_does(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "gemini"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("PATH", str(program.parent))
    assert all(each.path is None for each in known_agents.find_agents())
    program.chmod(0o755)
    (users / "mine.toml").write_text(f'extends = "custom"\ncommand = ["{program}"]\n')
    found = {each.name: each.path for each in known_agents.find_agents() if each.path is not None}
    assert found == {"gemini": str(program), "mine": str(program)}


def test_documented_table_has_the_variables_that_the_profiles_keep() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("| agents | keys of their providers |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`(\S+)`", cell) for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = {agent: keys for agents, keys in rows for agent in agents}
    kept = {agent: list(known_agents.load(agent).keep) for agent in known_agents.packaged()}
    assert found == {agent: keys or ["env="] for agent, keys in kept.items()}


# -- use of a profile ------------------------------------------------------------------------------------------------
def test_session_config_comes_from_profile_or_caller() -> None:
    kimi = known_agents.load("kimi")
    config = arguments.read_options(kimi, {}).config()
    assert (config.quiet_seconds, config.leaves_tools, config.after_interrupt) == (0.05, True, "sweep")
    config = arguments.read_options(kimi, {"quiet_seconds": 0, "after_interrupt": "keep"}).config()
    assert (config.quiet_seconds, config.leaves_tools, config.after_interrupt) == (0, True, "keep")
    config = arguments.read_options(known_agents.load("claude"), {}).config()
    assert (config.quiet_seconds, config.leaves_tools) == (0.0, False)


@pytest.mark.parametrize(
    "options", [{"quiet_seconds": QUIET_SECONDS_MAX + 1}, {"quiet_seconds": None}, {"after_interrupt": "kill"}]
)
def test_invalid_option_is_named_in_usage_error(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        arguments.read_options(known_agents.load("kimi"), options)
