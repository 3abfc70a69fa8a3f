"""Server of an editor's sessions: an existing one or an embedded one, and the effects of the death of either.

Every process here is real, and none is left at the end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.cli.acp.acp_client import SECONDS_MAX, Editor, environment
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import Served, shared

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server elsewhere, for tests that do not end it."""
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


class Announced(NamedTuple):
    """A server as announced in the state folder of an editor."""

    pid: int
    host: str
    port: int


def announced(folder: Path) -> Announced | None:
    try:
        said = json.loads((folder / "state" / "banksman" / "server.json").read_text())
    except FileNotFoundError:
        return None
    address = urlsplit(str(said["url"]))
    return Announced(said["pid"], address.hostname or "", address.port or 0)


def ask_server(folder: Path, path: str) -> Any:
    found = announced(folder)
    assert found is not None
    token = (folder / "state" / "banksman" / "token").read_text().strip()
    connection = http.client.HTTPConnection(found.host, found.port, timeout=SECONDS_MAX)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return json.loads(connection.getresponse().read())


# -- an embedded server ----------------------------------------------------------------------------------------------
def test_embedded_server_begins_without_another_and_ends_with_the_editor(tmp_path: Path) -> None:
    with Editor(tmp_path) as editor:
        editor.initialize()
        found = announced(tmp_path)
        assert found is not None
        assert found.pid == editor.process.pid
        assert found.host == "127.0.0.1"
        assert editor.prompt(editor.new(), "@@say hello") == "end_turn"
        assert editor.leave() == 0
    assert announced(tmp_path) is None
    # `serve` prints its token for a user. Here no output contains it.
    token = (tmp_path / "state" / "banksman" / "token").read_text().strip()
    assert token not in editor.stderr.read_text()


def test_embedded_server_takes_its_token_from_the_environment(tmp_path: Path) -> None:
    with Editor(tmp_path, env={"BANKSMAN_TOKEN": "a-token-of-the-user"}) as editor:
        assert editor.prompt(editor.new(), "@@say hello") == "end_turn"
        assert not (tmp_path / "state" / "banksman" / "token").exists()


def test_second_editor_uses_the_server_of_the_first(tmp_path: Path) -> None:
    with Editor(tmp_path) as first, Editor(tmp_path) as second:
        session = first.new()
        second.load(session)
        assert second.prompt(session, "@@say heard by both") == "end_turn"
        first.wait_said(session, "heard by both")
        found = announced(tmp_path)
        assert found is not None
        assert found.pid == first.process.pid
        assert second.leave() == 0
        assert first.prompt(session, "@@say on") == "end_turn"


def test_editors_starting_at_once_share_one_server(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        editors = [stack.enter_context(Editor(tmp_path)) for _ in range(3)]
        requests = [editor.begin("session/new", cwd=str(tmp_path), mcpServers=[]) for editor in editors]
        sessions = [editor.response(id)["result"]["sessionId"] for editor, id in zip(editors, requests, strict=True)]
        shown = ask_server(tmp_path, "/v1/sessions")["sessions"]
        assert sorted(each["id"] for each in shown) == sorted(sessions)
        assert {each["phase"] for each in shown} == {"idle"}
        # An editor with an embedded server would have to end it.
        found = announced(tmp_path)
        assert found is not None
        others = [editor for editor in editors if editor.process.pid != found.pid]
        assert len(others) == 2
        for editor in others:
            editor.leave()


def test_second_editor_starts_a_server_when_the_first_leaves(tmp_path: Path) -> None:
    with Editor(tmp_path) as first, Editor(tmp_path) as second:
        first.initialize()
        session = second.new()
        second.prompt(session, "@@say before")
        assert first.leave() == 0
        assert second.prompt(session, "@@recall") == "end_turn"
        found = announced(tmp_path)
        assert found is not None
        assert found.pid == second.process.pid
        # The same conversation, in another agent process.
        assert "@@say before" in second.texts(session)[-1]


def test_prompt_is_answered_as_unknown_when_its_server_is_killed(tmp_path: Path) -> None:
    with Editor(tmp_path) as first, Editor(tmp_path) as second:
        first.initialize()
        session = second.new()
        request = second.begin_prompt(session, "@@say begun\n@@hang")
        second.wait_said(session, "begun")
        first.kill()
        response = second.response(request)
        assert response["error"]["data"]["outcome"] == "unknown"
        assert second.prompt(session, "@@say on") == "end_turn"


# -- the end ---------------------------------------------------------------------------------------------------------
def test_editor_leaving_in_the_middle_of_a_turn_leaves_nothing_running(tmp_path: Path) -> None:
    with Editor(tmp_path) as editor:
        session = editor.new()
        editor.begin_prompt(session, "@@say begun\n@@hang")
        editor.wait_said(session, "begun")
        assert editor.leave() == 0
    with Editor(tmp_path) as again:
        again.load(session)
        assert again.said(session) == "begun"


def test_killed_editor_can_load_its_session_again(tmp_path: Path) -> None:
    with Editor(tmp_path) as editor:
        session = editor.new()
        editor.prompt(session, "@@say whole")
        editor.begin_prompt(session, '@@stream 2 0 part\n@@tool_use Bash {"command": "make"}\n@@hang')
        editor.wait(lambda message: "tool_call" in json.dumps(message))
        editor.kill()
    with Editor(tmp_path) as again:
        again.load(session)
        assert again.texts(session) == ["whole", "part0 part1 "]
        ends = [each["status"] for each in again.updates(session) if each["sessionUpdate"] == "tool_call_update"]
        assert ends == ["failed"]
        assert again.prompt(session, "@@say on") == "end_turn"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_acp_in_order_with_an_embedded_server(tmp_path: Path, number: int, code: int) -> None:
    with Editor(tmp_path) as editor:
        session = editor.new()
        editor.begin_prompt(session, "@@say begun\n@@hang")
        editor.wait_said(session, "begun")
        assert editor.signal(number) == code
    assert announced(tmp_path) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_acp_at_once_with_server_elsewhere(served: Served, tmp_path: Path, number: int, code: int) -> None:
    with Editor(tmp_path / "editor", served=served) as editor:
        editor.initialize()
        assert editor.signal(number) == code


def test_signal_before_any_request_ends_acp(tmp_path: Path) -> None:
    with Editor(tmp_path) as editor:
        # When it answers, its signal handlers are installed.
        editor.send(b"what?")
        editor.wait(lambda message: "error" in message)
        assert editor.signal(signal.SIGTERM) == 0


def test_acp_exits_when_its_stdout_is_closed(tmp_path: Path) -> None:
    """The reader of stdout is gone, while stdin stays open."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "banksman", "acp"],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(tmp_path / "state"),
    )
    os.close(write)
    os.close(read)
    with process:
        assert process.stdin is not None
        process.stdin.write(b"what?\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 0


def test_turn_continues_at_a_server_elsewhere_when_the_editor_leaves(served: Served, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with Editor(tmp_path / "editor", served=served) as editor:
        session = editor.new()
        editor.begin_prompt(session, f"@@say begun\n@@wait {go}\n@@say ended")
        editor.wait_said(session, "begun")
        assert editor.leave() == 0
    turn = served.get(f"/v1/sessions/{session}")["holder"]
    assert turn is not None
    with Editor(tmp_path / "editor", served=served) as again:
        again.load(session)
        assert again.said(session) == "begun"
        go.write_text("now")
        again.wait_said(session, "ended")
    assert served.outcome(session, turn)["kind"] == "done"


# -- a named server --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["flag", "variable"])
def test_named_server_is_never_replaced_by_an_embedded_one(tmp_path: Path, way: str) -> None:
    url = "http://127.0.0.1:1"
    words = ["--url", url] if way == "flag" else []
    env = {} if way == "flag" else {"BANKSMAN_URL": url}
    with Editor(tmp_path, words=words, env=env) as editor:
        error = editor.fail("initialize", protocolVersion=1)
        assert error["code"] == -32603
        assert url in error["message"]
        assert announced(tmp_path) is None


def test_named_server_is_found_again_after_a_restart(tmp_path: Path) -> None:
    words = ["--url", "http://127.0.0.1:{port}"]
    with Served(tmp_path / "server") as served, Editor(tmp_path / "editor", served=served, words=words) as editor:
        session = editor.new()
        editor.prompt(session, "@@say before")
        served.kill()
        served.start()
        assert editor.prompt(session, "@@say after") == "end_turn"
        assert editor.said(session) == "beforeafter"


def test_draining_server_is_not_used_by_a_new_editor(tmp_path: Path) -> None:
    """A draining server finishes its turns and accepts nothing new. A new editor gets an embedded server."""
    go = tmp_path / "go"
    os.mkfifo(go)
    with Served(tmp_path / "editor") as served:
        session = served.open({"prompt": [f"wait {go}"]})
        turn = served.ask(session, "work")
        wait_for(served, session, "turn.started", turn=turn)
        served.post("/v1/drain", {})
        with Editor(tmp_path / "editor", served=served) as editor:
            assert editor.prompt(editor.new(), "@@say hello") == "end_turn"
            go.write_text("now")


# -- usage -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("words", "code"), [(["--what"], 2), (["--"], 2), (["word"], 2), (["--help"], 0)])
def test_acp_exits_2_on_wrong_usage(tmp_path: Path, words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "banksman", "acp", *words],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS_MAX,
        check=False,
        env=environment(tmp_path),
    )
    assert done.returncode == code, done
    assert (code == 0) == bool(done.stdout)


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_acp_exits_2_without_stdin_or_stdout(tmp_path: Path, closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m banksman acp {closed}', sys.executable],
        capture_output=True,
        timeout=SECONDS_MAX,
        check=False,
        env=environment(tmp_path),
    )
    assert done.returncode == 2


def test_editor_settings_in_the_docs_start_acp(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "editors.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        [agent] = json.loads(block)["agent_servers"].values()
        assert agent["command"] == "banksman"
        done = subprocess.run(
            [sys.executable, "-m", "banksman", *agent["args"]],
            capture_output=True,
            input=b'{"jsonrpc":"2.0","id":1,"method":"what"}\n',
            timeout=SECONDS_MAX,
            check=True,
            env=environment(tmp_path),
        )
        assert json.loads(done.stdout)["error"]["code"] == -32601
