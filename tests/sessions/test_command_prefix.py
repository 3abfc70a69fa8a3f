"""Prefixes of an agent's command: what a sandbox leaves writable and visible, and words that stay words."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.test_containment import Scene, scene

from banksman import Host, Kind, UsageError
from banksman.sessions import command_prefix, containment
from banksman.sessions.command_prefix import SANDBOXES

__all__ = ["scene"]

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
ODD = ("$(touch mark)", "a;touch mark", "two words", "it's", 'a"b', "`id`", "*", "a\nb", "~", "")


def filled(wrap: Any, *argv: str, cwd: str = "/srv/work") -> list[str]:
    return containment.checked(wrap=wrap).words(argv, cwd=cwd, session="s")


# -- sandboxes -------------------------------------------------------------------------------------------------------
@needs_bwrap
@pytest.mark.parametrize("cwd", ["/", "/proc", "/proc/sys/kernel", "/sys/fs/cgroup", "link", "own", "own/inside"])
async def test_bwrap_refuses_a_folder_that_would_undo_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, cwd: str
) -> None:
    (scene.folder / "link").symlink_to("/proc/sys")
    (scene.folder / "own/banksman/inside").mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(scene.folder / "own"))
    cwd = cwd.replace("own", "own/banksman")
    async with Host(scene.store) as host:
        with pytest.raises(UsageError, match="writable in the sandbox bwrap"):
            await scene.open(host, cwd=scene.folder / cwd, wrap="bwrap")
        assert host.sessions() == []


@needs_bwrap
async def test_bwrap_refuses_a_folder_that_has_become_a_link(scene: Scene) -> None:
    work = scene.folder / "work"
    work.mkdir()
    async with Host(scene.store) as host:
        session = await scene.open(host, cwd=work, wrap="bwrap")
        work.rmdir()
        work.symlink_to("/proc/sys/kernel")
        outcome = await (await session.ask("one")).outcome()
    assert outcome.kind is Kind.FAILED
    assert "writable in the sandbox bwrap" in str(outcome.error)


@needs_bwrap
@pytest.mark.parametrize("cwd", ["/", "/proc", "/proc/sys/kernel", "/sys"])
async def test_bwrap_keeps_the_kernel_read_only_whatever_the_folder_is(scene: Scene, cwd: str) -> None:
    """The folder may be replaced after the check, so the words alone must hold."""
    script = "for file in /proc/sys/kernel/core_pattern /sys /sys/kernel; do [ -w $file ] && echo can-write; done"
    script += f"; [ -e /proc/{os.getpid()} ] && echo can-see; exit 3"
    async with Host(scene.store) as host:
        session = await scene.open(host, command=["sh", "-c", f"({script}) >&2"], cwd=cwd, wrap=SANDBOXES["bwrap"])
        outcome = await (await session.ask("one")).outcome()
    assert outcome.kind is Kind.FAILED
    assert "exited (code 3)" in str(outcome.error)
    assert "can-" not in str(outcome.error)


@needs_bwrap
@pytest.mark.parametrize("inside", ["work", "."])
async def test_bwrap_hides_the_files_of_banksman(scene: Scene, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    """With the token an agent could start a command outside, also if its folder is the user's home."""
    home = Path("/var/tmp") / f"banksman-{os.urandom(6).hex()}"  # /tmp is private anyway.
    files = [home / "state/banksman/token", home / "config/banksman/banksman.toml"]
    (home / "work").mkdir(parents=True)
    try:
        for file in files:
            file.parent.mkdir(parents=True)
            file.write_text("a secret\n")
        monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        script = 'cat "$0" "$1" >&2; touch inside; exit 3'
        async with Host(scene.store) as host:
            command = ["sh", "-c", script, *map(str, files)]
            session = await scene.open(host, command=command, cwd=home / inside, wrap="bwrap")
            outcome = await (await session.ask("one")).outcome()
        assert "No such file" in str(outcome.error)
        assert "a secret" not in str(outcome.error)
        assert (home / inside / "inside").exists()
    finally:
        shutil.rmtree(home)


# -- words that stay words -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [["ssh", "far"], ["/usr/bin/ssh", "-T", "far"], ["autossh", "far", "nice"]])
def test_words_behind_ssh_are_quoted(wrap: list[str]) -> None:

    words = filled(wrap, "agent", *ODD)
    assert words[: len(wrap)] == wrap
    # ssh joins them, and a shell splits them.
    assert shlex.split(" ".join(words[len(wrap) :])) == ["agent", *ODD]
    assert filled(wrap, "agent", "--plain", "a=b/c") == [*wrap, "agent", "--plain", "a=b/c"]


@pytest.mark.parametrize(
    "wrap",
    [
        ["ssh", "near", "ssh", "far"],
        ["nice", "ssh", "far"],
        ["docker", "exec", "-i", "ssh"],
        ["ssh", "far", "eval"],
        ["ssh", "far", "sh -c 'eval \"$@\"' sh"],
        ["sh", "-c", 'ssh far "$@"', "sh"],
        ["sh", "-c", 'exec ssh far "$@"', "sh"],
        ["sh", "-c", 'eval "$@"', "sh"],
    ],
)
def test_words_behind_a_deeper_ssh_are_refused_if_they_need_quotes(wrap: list[str]) -> None:
    assert filled(wrap, "agent", "--plain") == [*wrap, "agent", "--plain"]
    for word in ODD:
        with pytest.raises(UsageError, match="does not keep the words of the agent's command apart") as caught:
            filled(wrap, "agent", word)
        assert "exec {command}" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "exec '{command}'",
        'exec "{command}"',
        "su -c 'cd / && exec {command}'",
        "echo `{command}`",
        "exec \\{command}",
        "ssh far {command}",
        "exec /usr/bin/ssh -T far exec {command}",
        "eval {command}",
    ],
)
def test_command_that_a_shell_would_parse_wrongly_is_refused(text: str) -> None:
    assert filled(["sh", "-c", text], "agent", "--plain")[2] == text.replace("{command}", "agent --plain")
    for word in ODD:
        with pytest.raises(UsageError, match=r"wrap has \{command\} in the text of a program") as caught:
            filled(["sh", "-c", text], "agent", word)
        assert "out of quotes" in str(caught.value.hint)


@pytest.mark.parametrize(
    "before",
    [
        ["ssh", "near", "ssh", "far"],
        ["ssh", "near", "ssh far sh -c"],
        ["ssh", "far", "eval"],
        ["sh", "-c", 'ssh near ssh far "$@"', "sh"],
        ["sh", "-c", 'eval ssh far "$@"', "sh"],
        # Behind the host, and behind another program, -e has a meaning of its own.
        ["ssh", "near", "sh", "-e", "ssh far"],
        ["sshpass", "-e", "ssh", "near", "ssh", "far"],
    ],
)
def test_values_that_two_shells_would_parse_are_refused(before: list[str]) -> None:
    assert filled([*before, "cd {cwd} && {command}"], "agent")[-1] == "cd /srv/work && agent"
    for word in ODD:
        with pytest.raises(UsageError, match=r"wrap has \{command\} in the text of a program"):
            filled([*before, "exec {command}"], "agent", word)
        with pytest.raises(UsageError, match=r"wrap has \{cwd\} in the text of a program"):
            filled([*before, "cd {cwd} && {command}"], "agent", cwd=f"/srv/{word}!")


@pytest.mark.parametrize(
    "options",
    [
        ["-o", "ProxyCommand ssh -W %h:%p jump"],
        ["-Tp", "22", "-qo", "ProxyCommand ssh -W %h:%p jump"],
        ["-oProxyCommand ssh -W %h:%p jump"],
        ["-e", "ssh"],
    ],
)
def test_option_of_ssh_is_no_second_ssh(options: list[str]) -> None:
    before = ["ssh", *options, "far"]
    command = shlex.join(["agent", *ODD])
    assert filled([*before, "cd {cwd} && {command}"], "agent", *ODD)[-1] == f"cd /srv/work && {command}"
    assert filled(before, "agent", *ODD) == [*before, *map(shlex.quote, ["agent", *ODD])]
    with pytest.raises(UsageError, match=r"wrap has \{command\} in the text of a program"):
        filled([*before, "ssh", *options, "behind", "{command}"], "agent", *ODD)


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "ssh far mkdir -p {cwd}; exec {command}"],
        ["sh", "-c", 'ssh far mkdir -p "$1"', "sh", "{cwd}"],
        ["sh", "-c", 'eval "$@"', "sh", "cd", "{cwd}"],
    ],
)
def test_folder_that_a_second_shell_would_parse_is_refused(words: list[str]) -> None:
    assert "/srv/work" in filled(words)[-1] + filled(words)[2]
    for word in ODD:
        with pytest.raises(UsageError, match=r"wrap has \{cwd\} in the text of a program"):
            filled(words, cwd=f"/srv/{word}!")


@pytest.mark.parametrize(
    "text", ["exec {command}", "cd \"$HOME\" && echo 'it' && exec {command}", "cat ~/.ssh; {command}"]
)
def test_command_outside_of_quotes_takes_every_word(text: str) -> None:

    found = filled(["sh", "-c", text], "agent", *ODD)[2]
    assert found == text.replace("{command}", shlex.join(["agent", *ODD]))


@pytest.mark.parametrize("words", [["su", "--command={cwd}/setup"], ["x", "--eval={cwd}/a"]])
def test_folder_in_an_option_with_a_text_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"on_open has \{cwd\} in the text of a program"):
        command_prefix.filled("on_open", words, cwd="/srv/$(id)", session="s")
