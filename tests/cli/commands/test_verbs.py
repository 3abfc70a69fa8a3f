"""Verbs that need a server, in a shell, with a real server and the scripted agent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tests.server.kit import TOKEN, Served, shared
from tests.thorough import one_in

from banksman.cli.commands import ask
from banksman.testing import fake_agent

BANKSMAN = [sys.executable, "-m", "banksman"]
SECONDS_MAX = 60.0
AGENT = fake_agent.command()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


def environment(served: Served, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(served.folder / "state"), "BANKSMAN_TOKEN": TOKEN, **more}


def run(served: Served, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"env": environment(served), **options}
    return subprocess.run(
        [*BANKSMAN, *words], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, **options
    )


@contextlib.contextmanager
def begin(served: Served, *words: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*BANKSMAN, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(served),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_line(stream: IO[str] | None, word: str) -> str:
    assert stream is not None
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"{word!r} never came")


def wait_holds(served: Served, session: str, count: int) -> None:
    """Wait until the session has this many holds. The log has no event of one that waits."""
    deadline = time.monotonic() + SECONDS_MAX
    while len(served.get(f"/v1/sessions/{session}")["holds"]) != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def objects(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_cli_open_ask_close_and_forget_a_session(served: Served) -> None:
    done = run(served, "open", "claude", "--name", "whole", "--", *AGENT)
    assert done.returncode == 0, done
    session = done.stdout.strip()
    asked = run(served, "ask", "whole", "@@say hello\n@@say there")
    assert (asked.returncode, asked.stdout) == (0, "hello\nthere\n")
    assert asked.stderr.startswith("done, $")
    closed = run(served, "close", "whole")
    assert (closed.returncode, closed.stdout) == (0, "whole: closed\n")
    forgotten = run(served, "close", session, "--forget", "--json")
    assert objects(forgotten.stdout) == [{"forgotten": session}]
    gone = run(served, "log", session)
    assert gone.returncode == 4
    assert gone.stdout == ""


def test_cli_open_prints_the_id_and_uses_the_current_folder(served: Served, tmp_path: Path) -> None:
    done = run(served, "open", "claude", "--json", "--", *AGENT, cwd=tmp_path)
    session = objects(done.stdout)[0]
    opening = objects(run(served, "log", session["id"], "--json").stdout)[0]
    assert opening["body"]["cwd"] == str(tmp_path)
    assert opening["body"]["command"] == AGENT


@pytest.mark.thorough
def test_cli_ask_reads_the_prompt_from_stdin_and_opens_once(served: Served) -> None:
    for said in ("one", "two"):
        words = ("ask", "piped", "-", "--open", "claude", "--format", "quiet", "--", *AGENT)
        done = run(served, *words, input=said)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\n", "")
    named = [each for each in objects(run(served, "ps", "--json").stdout)[0]["sessions"] if each["name"] == "piped"]
    assert len(named) == 1


def test_cli_ask_accepts_a_prompt_that_begins_with_a_dash(served: Served) -> None:
    served.open(name="dash")
    assert run(served, "ask", "dash", "--", "-n is a flag").stdout == "-n is a flag\n"


def test_cli_ask_json_is_the_events_of_the_turn_then_its_outcome(served: Served) -> None:
    served.open(name="json")
    run(served, "ask", "json", "before")
    done = run(served, "ask", "json", "@@say hello", "--json")
    *events, last = objects(done.stdout)
    assert {event["turn"] for event in events} == {last["turn"]}
    assert events[0]["kind"] == "turn.queued"
    assert events[-1]["kind"] == "turn.ended"
    assert (last["state"], last["outcome"]["kind"], last["outcome"]["text"]) == ("ended", "done", "hello")


def test_cli_ask_exits_1_when_the_turn_fails(served: Served) -> None:
    served.open(name="fails")
    done = run(served, "ask", "fails", "@@exit 3")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("failed")


def test_cli_ask_ends_at_its_deadline(served: Served) -> None:
    served.open(name="deadline")
    run(served, "ask", "deadline", "@@hang", "--no-wait")
    late = run(served, "ask", "deadline", "late", "--deadline", "0.1")
    assert late.returncode == 1
    assert late.stderr.splitlines()[-1].startswith("withdrawn by the deadline clock")
    assert run(served, "interrupt", "deadline").returncode == 0


@pytest.mark.parametrize("verb", ["ask", "run"])
def test_cli_refuses_deadline_of_zero(served: Served, verb: str) -> None:
    done = run(served, verb, "claude", "hello", "--deadline", "0")
    assert done.returncode == 2
    assert "--deadline must be a number of seconds greater than 0" in done.stderr


def test_cli_ask_no_wait_returns_the_turn_and_a_key_finds_it_again(served: Served) -> None:
    session = served.open(name="key")
    first = run(served, "ask", "key", "@@say hello", "--key", "k", "--no-wait")
    turn = first.stdout.strip()
    assert served.outcome(session, turn)["kind"] == "done"
    again = run(served, "ask", "key", "@@say hello", "--key", "k")
    assert (again.returncode, again.stdout) == (0, "hello\n")
    other = run(served, "ask", "key", "@@say something else", "--key", "k")
    assert other.returncode == 4
    queued = [each for each in objects(run(served, "log", "key", "--json").stdout) if each["kind"] == "turn.queued"]
    assert [each["turn"] for each in queued] == [turn]


def test_cli_ask_ctrl_c_stops_the_turn(served: Served) -> None:
    session = served.open(name="stop")
    with begin(served, "ask", "stop", "@@say begun\n@@hang", "--json") as asking:
        wait_line(asking.stdout, '"text":"begun"')
        asking.send_signal(signal.SIGINT)
        rest, told = asking.communicate(timeout=SECONDS_MAX)
        assert asking.returncode == 130
    assert objects(rest)[-1]["outcome"]["kind"] == "interrupted"
    assert "Ctrl-C again" in told
    assert "stopped, by boundary" in told
    # The session continues.
    assert run(served, "ask", session, "hi").stdout == "hi\n"


@pytest.mark.thorough
def test_cli_ask_ctrl_c_twice_leaves_at_once(served: Served) -> None:
    served.open(name="leave")
    with begin(served, "ask", "leave", "@@on_interrupt ignored\n@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        asking.send_signal(signal.SIGINT)
        wait_line(asking.stderr, "Ctrl-C again")
        asking.send_signal(signal.SIGINT)
        _, told = asking.communicate(timeout=SECONDS_MAX)
        # The verb waited neither for the receipt nor for the outcome.
        assert (asking.returncode, told) == (130, "")


@pytest.mark.thorough
def test_cli_edit_changes_the_waiting_prompt(served: Served) -> None:
    session = served.open(name="edits")
    run(served, "ask", "edits", "@@hang", "--no-wait")
    waiting = run(served, "ask", "edits", "worse", "--no-wait").stdout.strip()
    assert run(served, "edit", "edits", waiting, "better", "--priority", "5").stdout == "edited; 1 queued\n"
    assert run(served, "interrupt", session).returncode == 0
    assert served.outcome(session, waiting)["text"] == "better"
    assert run(served, "edit", session, waiting, "late").returncode == 4


@pytest.mark.thorough
def test_cli_hold_reserves_the_session_until_its_release(served: Served) -> None:
    session = served.open(name="holds")
    hold = run(served, "hold", "holds", "--caller", "ann").stdout.strip()
    waiting = run(served, "ask", "holds", "outsider", "--no-wait").stdout.strip()
    assert run(served, "ask", "holds", "mine", "--hold", hold).stdout == "mine\n"
    assert f"holder    hold {hold} of ann, priority 10, since " in run(served, "why", "holds").stdout
    (shown,) = (row for row in run(served, "ps").stdout.splitlines() if " holds " in row)
    assert f" {hold} " in shown
    assert " ann " in shown
    second = objects(run(served, "hold", session, "--no-wait", "--format", "json").stdout)[0]
    assert second["at"] is None
    assert f"hold {second['hold']}, priority 10, waits in the queue" in run(served, "why", session).stdout
    assert run(served, "hold", session, "--release", second["hold"], "--format", "quiet").stdout == ""
    assert run(served, "hold", session, "--release", hold).stdout == f"released {hold}\n"
    assert served.outcome(session, waiting)["text"] == "outsider"
    assert run(served, "hold", session, "--release", hold).returncode == 4
    assert run(served, "hold", session, "--release", hold, "--no-wait").returncode == 2


@pytest.mark.thorough
def test_cli_hold_waits_and_ctrl_c_withdraws_it(served: Served) -> None:
    session = served.open(name="waits")
    hold = run(served, "hold", "waits").stdout.strip()
    with begin(served, "hold", "waits") as waiting:
        wait_holds(served, session, 2)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(SECONDS_MAX) == 130
    assert [each["hold"] for each in served.get(f"/v1/sessions/{session}")["holds"]] == [hold]
    with begin(served, "hold", "waits") as waiting:
        wait_holds(served, session, 2)
        assert run(served, "hold", "waits", "--release", hold).returncode == 0
        granted, _ = waiting.communicate(timeout=SECONDS_MAX)
    assert [each["hold"] for each in served.get(f"/v1/sessions/{session}")["holds"]] == [granted.strip()]


@pytest.mark.thorough
def test_cli_export_and_bundle_write_new_private_files(served: Served, tmp_path: Path) -> None:
    session = served.open(name="files")
    run(served, "ask", "files", "hello")
    export, bundle = tmp_path / "files.ndjson", tmp_path / "files.zip"
    done = run(served, "export", "files", str(export))
    assert done.stdout == f"wrote {export}, {export.stat().st_size} bytes\n"
    assert export.read_bytes() == served.request("GET", f"/v1/sessions/{session}/export").body
    assert run(served, "export", "files", "-").stdout == export.read_text()
    assert run(served, "bundle", "files", str(bundle), "--no-text", "--format", "quiet").stdout == ""
    with zipfile.ZipFile(bundle) as file:
        assert "session.ndjson" in file.namelist()
        assert b"hello" not in file.read("session.ndjson")
    assert [each.stat().st_mode & 0o777 for each in (export, bundle)] == [0o600, 0o600]
    again = run(served, "export", "files", str(export))
    assert (again.returncode, again.stderr) == (
        2,
        f"banksman: cannot write {export}: it exists already (remove it, or use another name)\n",
    )
    assert run(served, "export", "none", str(tmp_path / "none")).returncode == 4
    assert run(served, "bundle", "files", str(tmp_path / "no" / "folder")).returncode == 2
    assert sorted(each.name for each in tmp_path.glob("files*")) == ["files.ndjson", "files.zip"]


def test_cli_interrupt_stops_the_running_and_withdraws_a_waiting_turn(served: Served) -> None:
    session = served.open(name="interrupts")
    run(served, "ask", "interrupts", "@@hang", "--no-wait")
    waiting = run(served, "ask", "interrupts", "later", "--no-wait").stdout.strip()
    assert run(served, "interrupt", session, waiting).stdout == "stopped, by withdrawn\n"
    done = run(served, "interrupt", "interrupts", "--json")
    assert done.returncode == 0
    assert objects(done.stdout)[0]["stopped"] is True
    assert run(served, "interrupt", session, waiting, "--format", "quiet").stdout == ""


def test_cli_ask_shows_a_question_and_cli_answer_answers_it(served: Served) -> None:
    served.open(name="asks")
    with begin(served, "ask", "asks", '@@ask Bash {"command": "ls"}\n@@say over') as asking:
        assert "Bash: ls" in wait_line(asking.stderr, "question:")
        question = wait_line(asking.stderr, "banksman answer").split()[3]
        told = run(served, "why", "asks").stdout
        assert f"{question}: Bash: ls\n" in told
        assert f"  banksman answer asks {question} allow|deny\n" in told
        done = run(served, "answer", "asks", "--message", "not here", "deny")
        assert (done.returncode, done.stdout) == (0, f"{question}: deny\n")
        out, _ = asking.communicate(timeout=SECONDS_MAX)
        assert (asking.returncode, out.splitlines()[-1]) == (0, "over")
    # A question has one answer: the same answer again succeeds, and another one fails.
    assert run(served, "answer", "asks", question, "deny").returncode == 0
    late = run(served, "answer", "asks", question, "allow", "--json")
    assert (late.returncode, objects(late.stdout)[0]["answer"], objects(late.stdout)[0]["first"]) == (1, "deny", False)
    nothing = run(served, "answer", "asks", "allow")
    assert (nothing.returncode, "no question is open" in nothing.stderr) == (2, True)


@pytest.mark.thorough
def test_cli_ask_why_and_answer_show_a_question_in_full(served: Served) -> None:
    served.open(name="asks-code")
    given = {"description": "print the date", "code": "import shutil\nshutil.rmtree('/home')"}
    shown = ["│ code:", "│   import shutil", "│   shutil.rmtree('/home')", "│ the agent says: print the date"]

    def blocks(text: str) -> list[str]:
        return [line for line in map(str.strip, text.splitlines()) if "│" in line]

    with begin(served, "ask", "asks-code", f"@@ask mcp__py__run {json.dumps(given)}\n@@say over") as asking:
        told: list[str] = []
        while not told or "banksman answer" not in told[-1]:
            assert asking.stderr is not None
            told.append(asking.stderr.readline())
            assert told[-1], told
        assert blocks("".join(told)) == shown
        # `why` puts a label before the first line.
        assert [line[line.index("│") :] for line in blocks(run(served, "why", "asks-code").stdout)] == shown
        # `answer` without a question id also shows the question that it answers.
        assert blocks(run(served, "answer", "asks-code", "deny").stderr) == shown
        assert asking.wait(SECONDS_MAX) == 0


def test_cli_ps_and_why_show_holder_queue_and_commands(served: Served) -> None:
    session = served.open(name="busy")
    holder = run(served, "ask", "busy", "@@hang", "--no-wait").stdout.strip()
    waiting = run(served, "ask", "busy", "later", "--no-wait", "--priority", "background").stdout.strip()
    command = served.post("/v1/commands", {"argv": ["sleep", "61"]})
    shown = run(served, "ps").stdout.splitlines()
    row = next(line for line in shown if session in line).split()
    assert row[:7] == ["running", "busy", session, "claude", holder, "1", "0"]
    assert any(line.startswith(f"{command['id']} ") and line.endswith("sleep 61") for line in shown)
    assert {session, command["id"]} <= set(run(served, "ps", "--format", "quiet").stdout.split())
    told = run(served, "why", "busy").stdout
    assert re.search(rf"holder    {holder}, since [0-9:]+\n          @@hang\n", told)
    assert "state     running\n" in told
    assert f"{waiting}, priority " in told
    assert ": later\n" in told
    assert '"@@hang"' in next(line for line in told.splitlines() if line.startswith("last out  "))
    assert "python" in told
    assert objects(run(served, "why", "busy", "--json").stdout)[0]["holder"] == holder
    served.post(f"/v1/commands/{command['id']}/stop", {})
    assert command["id"] not in run(served, "ps").stdout
    assert command["id"] in run(served, "ps", "--all").stdout
    run(served, "interrupt", "busy")
    assert "also list ended commands" in run(served, "ps", "--help").stdout


@pytest.mark.thorough
def test_cli_why_stacks_shows_tasks_of_the_server(served: Served) -> None:
    served.open(name="stacks")
    assert "task " in run(served, "why", "--stacks").stdout
    both = run(served, "why", "stacks", "--stacks", "--json")
    assert objects(both.stdout)[0]["name"] == "stacks"
    assert objects(both.stdout)[0]["stacks"]["tasks"]
    assert run(served, "why").returncode == 2


@pytest.mark.thorough
def test_cli_log_pages_and_limits(served: Served) -> None:
    served.open(name="logged")
    run(served, "ask", "logged", "@@stream 3 0\n@@say hello")
    events = objects(run(served, "log", "logged", "--json").stdout)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    after = events[4]["cursor"]
    part = objects(run(served, "log", "logged", "--json", "--after", after, "-n", "2").stdout)
    assert [event["seq"] for event in part] == [6, 7]
    followed = objects(run(served, "log", "logged", "--json", "-f", "-n", str(len(events))).stdout)
    assert followed == events
    cursors = run(served, "log", "logged", "--format", "quiet").stdout.split()
    assert cursors == [event["cursor"] for event in events]
    raw = objects(run(served, "log", "logged", "--raw", "--json").stdout)
    assert any('"type":"assistant"' in event.get("frame", "").replace(" ", "") for event in raw)
    text = run(served, "log", "logged").stdout
    assert "says hello" in text
    assert "<" in run(served, "log", "logged", "--raw").stdout
    assert run(served, "log", "logged", "--after", "nonsense").returncode == 4
    assert run(served, "log", "logged", "--after", "x\r\ny", "--follow").returncode == 4


@pytest.mark.thorough
def test_cli_log_follow_continues_until_ctrl_c(served: Served) -> None:
    served.open(name="followed")
    with begin(served, "log", "followed", "--follow", "--json") as following:
        wait_line(following.stdout, "session.opened")
        for _ in range(2):
            run(served, "ask", "followed", "hi")
            wait_line(following.stdout, "turn.ended")
        run(served, "close", "followed")
        wait_line(following.stdout, "session.closed")
        following.send_signal(signal.SIGINT)
        rest, told = following.communicate(timeout=SECONDS_MAX)
        assert (following.returncode, rest, told) == (130, "", "")


@pytest.mark.thorough
def test_cli_log_follow_ends_when_its_session_is_deleted(served: Served) -> None:
    served.open(name="deleted")
    with begin(served, "log", "deleted", "--follow") as following:
        wait_line(following.stdout, "session.opened")
        run(served, "close", "deleted", "--forget")
        out, told = following.communicate(timeout=SECONDS_MAX)
        assert following.returncode == 4
        assert "session.closed" in out
        assert "Traceback" not in told


@pytest.mark.thorough
def test_cli_escapes_terminal_sequences_of_an_agent(served: Served) -> None:
    evil = "\x1b]0;title\x07\x1b[2Jred\x9b31m\u202edlrow\x7f\r.\ttab"
    served.open(name="evil")
    done = run(served, "ask", "evil", f"@@say {evil}")
    assert done.stdout == "\\x1b]0;title\\x07\\x1b[2Jred\\x9b31m\\u202edlrow\\x7f\\r.\ttab\n"
    for words in (("log", "evil"), ("log", "evil", "--raw"), ("log", "evil", "--json"), ("why", "evil"), ("ps",)):
        shown = run(served, *words).stdout
        assert not set(shown) & set("\x1b\x07\x9b\u202e\x7f\r"), words
    # A name is untrusted text as well.
    served.request("PATCH", "/v1/sessions/evil", {"name": "e\x1b[1mvil"})
    assert "\x1b" not in run(served, "ps").stdout


@pytest.mark.thorough
def test_cli_log_ends_quietly_when_its_reader_has_enough(served: Served) -> None:
    served.open(name="pipe")
    run(served, "ask", "pipe", "@@stream 3000 0")
    for words in (["log", "pipe", "--json"], ["log", "pipe", "--json", "--follow"]):
        line = " ".join([*BANKSMAN, *words])
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line} | head -1"],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env=environment(served),
        )
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
        assert objects(done.stdout)[0]["kind"] == "session.opened"


@pytest.mark.parametrize(
    "words", one_in(4, [(("log", "full"),), (("log", "full", "--json"),), (("ps",),), (("why", "nobody", "--json"),)])
)
def test_cli_exits_5_in_one_line_when_stdout_cannot_be_written(served: Served, words: tuple[str, ...]) -> None:
    served.open(name="full")
    line = " ".join([*BANKSMAN, *words])
    is_refused = "nobody" in words
    for redirection, reason in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        done = subprocess.run(
            ["bash", "-c", f"{line} {redirection}"],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env=environment(served),
        )
        # The refusal goes to stderr first, so it is not lost.
        said = "there is no session 'nobody' (see banksman ps)" if is_refused else f"cannot write to stdout: {reason}"
        assert (done.returncode, done.stderr) == (4 if is_refused else 5, f"banksman: {said}\n")
    assert "5 cannot write to stdout" in run(served, words[0], "--help").stdout


@pytest.mark.thorough
def test_cli_escapes_letters_missing_in_the_locale(served: Served) -> None:
    served.open(name="ascii")
    done = run(served, "ask", "ascii", "@@say h\u00e9 \u2026", env=environment(served, PYTHONIOENCODING="ascii"))
    assert (done.returncode, done.stdout) == (0, "h\\xe9 \\u2026\n")


def test_cli_exits_4_on_refusal_and_3_on_wrong_token(served: Served) -> None:
    assert run(served, "why", "nobody").returncode == 4
    refused = run(served, "ask", "nobody", "hi", "--json")
    assert refused.returncode == 4
    assert objects(refused.stdout)[0]["status"] == 404
    for token in ("wrong", ""):
        variables = environment(served, BANKSMAN_TOKEN=token, XDG_STATE_HOME="/nowhere/at/all")
        assert run(served, "ps", "--url", served.url, env=variables).returncode == 3
    out = run(served, "ps", "--url", served.url, env=environment(served, BANKSMAN_TOKEN="wrong"))
    assert (out.returncode, "BANKSMAN_TOKEN" in out.stderr) == (3, True)
    assert TOKEN not in out.stderr


def test_cli_page_prints_a_link_that_logs_a_browser_in(served: Served) -> None:
    by_socket = run(served, "page").stdout.strip()
    by_url = objects(run(served, "page", "--json", "--url", served.url).stdout)[0]["link"]
    for link in (by_socket, by_url):
        url, _, code = link.partition("/#code=")
        assert url == served.url
        assert served.post("/v1/login", {"code": code}, token=False)["token"].startswith("bmp_")


def test_cli_url_with_a_token_can_be_pasted(served: Served) -> None:
    variables = environment(served, BANKSMAN_TOKEN="", XDG_STATE_HOME="/nowhere/at/all")
    done = run(served, "ps", "--json", "--url", f"{served.url}/#token={TOKEN}", env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    refused = run(served, "ps", "--url", f"{served.url}/#token=wrong-one", env=variables)
    assert (refused.returncode, "wrong-one" in refused.stderr) == (3, False)


def test_cli_errors_name_flags_instead_of_arguments(served: Served) -> None:
    empty = run(served, "open", "claude", "--name", "")
    assert (empty.returncode, empty.stderr) == (4, "banksman: --name cannot be empty\n")
    session = run(served, "open", "claude", "--", *AGENT).stdout.strip()
    busy = run(served, "ask", session, "hello", "--on-busy", "foo")
    assert "banksman: --on-busy cannot be 'foo' (use one of: " in busy.stderr
    cursor = run(served, "log", session, "--after", "zzz")
    assert "(use the `cursor` of an event, or leave it out to begin at the first event)" in cursor.stderr


def test_cli_open_help_says_that_one_machine_ignores_labels(served: Served) -> None:
    told = " ".join(run(served, "open", "--help").stdout.split())
    assert "in a cluster, label that the host must have" in told
    assert "a server on one machine ignores it" in told


def test_cli_ask_help_names_every_busy_policy(served: Served) -> None:
    told = " ".join(run(served, "ask", "--help").stdout.split())
    assert "enqueue, reject, interrupt, steer or collect" in told


def test_cli_ask_help_exits_0_and_a_wrong_flag_2(served: Served) -> None:
    done = run(served, "ask", "--help")
    assert done.returncode == 0
    assert done.stdout.rstrip().splitlines()[-1].startswith("  banksman ask")
    assert run(served, "ask", "--no-such-flag").returncode == 2


@pytest.mark.thorough
def test_cli_usage_counts_turn_under_its_caller(served: Served) -> None:
    asked = run(served, "ask", "counted", "hello", "--caller", "alice", "--open", "claude", "--", *AGENT)
    assert asked.returncode == 0, asked
    told = json.loads(run(served, "usage", "--by", "caller", "--json").stdout)
    [alice] = [row for row in told["rows"] if row["key"] == "alice"]
    assert (told["by"], alice["usage"]["turns"]) == ("caller", 1)
    assert alice["usage"]["tokens"]["input"] > 0
    shown = run(served, "usage", "--by", "caller").stdout.splitlines()
    assert shown[0].split()[:4] == ["CALLER", "TURNS", "INPUT", "OUTPUT"]
    assert [line.split()[1] for line in shown if line.startswith("alice ")] == ["1"]
    assert "alice" in run(served, "usage", "--by", "caller", "--format", "quiet").stdout.split()
    assert run(served, "usage", "--until", "1999-12-31").stdout.startswith("no usage")
    long = "a" * 200
    assert run(served, "ask", "counted", "hello", "--caller", long).returncode == 0
    shown = run(served, "usage", "--by", "caller").stdout.splitlines()
    assert [line.split()[0] for line in shown if line.startswith("aaa")] == [f"{'a' * 59}…"]
    assert long in run(served, "usage", "--by", "caller", "--json").stdout


@pytest.mark.thorough
def test_cli_refuses_wrong_days_and_callers_before_it_opens_a_session(served: Served) -> None:
    for wrong in (("--since", "tomorrow"), ("--until", "20261118"), ("--by", "moon")):
        assert run(served, "usage", *wrong).returncode == 2
    assert run(served, "ask", "no-such-session", "hello", "--caller", "a" * 201).returncode == 2
    refused = run(served, "run", "claude", "hello", "--caller", "", "--name", "left-behind")
    assert (refused.returncode, "caller cannot be ''" in refused.stderr) == (2, True)
    assert "left-behind" not in run(served, "ps", "--all", "--json").stdout


def test_usage_does_not_create_the_store_that_it_names(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "store.db"
    done = run(served, "usage", "--store", f"sqlite:{path}")
    assert done.returncode == 2, done
    assert f"there is no store {path}" in done.stderr
    assert not path.parent.exists()


@pytest.mark.thorough
def test_cli_contains_the_agent_of_an_embedded_host_and_why_shows_it(served: Served, tmp_path: Path) -> None:
    """An embedded host runs as its caller, who may choose everything. A server refuses it by default."""
    wrap = ("--wrap", "env WRAPPED='{session} in {cwd}'", "--limit", "nofile=100", "--scrub", "secrets,PLAIN")
    wrap = (*wrap, "--on-open", "touch {cwd}/made", "--on-close", "rm 'no such'")
    agent = ("--", *fake_agent.command())
    refused = run(served, "open", "claude", *wrap, *agent)
    assert (refused.returncode, "callers_choose" in refused.stderr) == (4, True)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    opened = run(served, "open", "claude", "--name", "n", "--cwd", str(tmp_path), *wrap, *agent, env=env)
    assert opened.returncode == 0, opened.stderr
    assert (tmp_path / "made").exists()
    done = run(served, "why", "n", env=env)
    for line in (
        "limits: nofile=100",
        "scrub: secrets PLAIN",
        "wrap: env 'WRAPPED={session} in {cwd}'",
        "on_close: rm 'no such'",
    ):
        assert line in done.stdout


FLAGS_OF_OPEN = [
    *("--cwd=/", "--fallback=codex", "--budget=turns=1", "--on-budget=stop", "--user=nobody", "--limit=nofile=9"),
    *("--scrub=secrets", "--wrap=env", "--sandbox=bwrap", "--on-open=true", "--on-close=true"),
]


@pytest.mark.parametrize("flag", FLAGS_OF_OPEN)
def test_ask_refuses_a_flag_that_only_an_open_obeys(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        ask.main(["n", "hello", flag])
    assert caught.value.code == 2
    assert f"cannot use {flag.partition('=')[0]} without --open" in capsys.readouterr().err


def test_cli_log_stderr_prints_the_stderr_of_the_running_agent(served: Served) -> None:
    """Its text cannot act on the terminal."""
    session = served.open()
    served.outcome(session, served.ask(session, "@@stderr what \x1b[31m it says"))
    while "it says" not in served.get(f"/v1/sessions/{session}/stderr")["text"]:
        pass
    assert run(served, "log", session, "--stderr").stdout == "what \\x1b[31m it says\n"
    assert objects(run(served, "log", session, "--stderr", "--json").stdout) == [{"text": "what \x1b[31m it says\n"}]
    assert run(served, "log", session, "--stderr", "--follow").returncode == 2


def test_cli_export_keeps_a_file_that_has_the_name_of_its_partial_file(served: Served, tmp_path: Path) -> None:
    session = served.open()
    served.outcome(session, served.ask(session, "hello"))
    file = tmp_path / "log.ndjson"
    # The shell becomes the program, with the same pid.
    script = f'echo precious > "{file}.$$.part"; exec "$@"'
    words = ["sh", "-c", script, "sh", *BANKSMAN, "export", session, str(file)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=environment(served)
    )
    assert (done.returncode, "cannot write" in done.stderr) == (2, True), done
    assert [each.read_text() for each in tmp_path.iterdir()] == ["precious\n"]
