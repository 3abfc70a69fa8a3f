"""Background commands over HTTP: start, output, watch, stdin, signal, resize and stop.

Each test waits for its commands to end, or stops them, because some tests ask the shared server for every end.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.kit import AUTHORIZATION, SECONDS_MAX, Sent, Served

from banksman import Host
from banksman.server.access.roles import ADMIN
from banksman.server.api.command_routes import ROUTES
from banksman.server.api.request_replay import RequestReplay
from banksman.server.api.route import Endpoint


def start(served: Served, *argv: str, **more: Any) -> str:
    """Start a command and return its path."""
    answer = served.request("POST", "/v1/commands", {"argv": argv, **more})
    assert answer.status == 201, answer
    assert answer.headers["location"] == f"/v1/commands/{answer.json['id']}"
    return answer.headers["location"]


def finished(served: Served, path: str) -> Any:
    done = served.get(f"{path}?wait=60")["finished"]
    assert done is not None
    return done


def read_all(served: Served, path: str, **query: Any) -> str:
    text, after = "", 0
    while True:
        words = "&".join(f"{name}={value}" for name, value in query.items())
        piece = served.get(f"{path}/output?after={after}&wait=60&{words}")
        text, after = text + piece["text"], piece["next"]
        if piece["end"]:
            return text


def test_command_runs_from_start_to_end(served: Served, tmp_path: Path) -> None:
    path = start(served, "sh", "-c", "pwd; echo $WORD; echo oops >&2; exit 3", cwd=str(tmp_path), env={"WORD": "said"})
    done = finished(served, path)
    assert (done["ended"], done["code"], done["signal"], done["survivors"]) == ("exited", 3, None, [])
    assert read_all(served, path) == f"{tmp_path}\nsaid\n"
    assert read_all(served, path, stream="stderr") == "oops\n"
    assert path.rpartition("/")[2] in [command["id"] for command in served.get("/v1/commands")["commands"]]


def test_commands_ended_reports_each_end_once(served: Served) -> None:
    waited, stopped, looked_at = (start(served, "cat", stdin="pipe") for _ in range(3))
    assert served.post("/v1/commands/ended") == {"commands": []}
    for path in (waited, looked_at):
        served.post(f"{path}/stdin", {"end": True})
    assert served.get(f"{waited}?wait=60")["finished"]["code"] == 0
    assert served.post(f"{stopped}/stop")["finished"]["ended"] == "stopped"
    # The answer may be lost. The same request with the same key gets the same answer.
    answers = [served.post("/v1/commands/ended", {"wait": 60}, headers={"Idempotency-Key": "first"}) for _ in range(2)]
    assert [[f"/v1/commands/{each['id']}" for each in answer["commands"]] for answer in answers] == [[looked_at]] * 2
    assert served.post("/v1/commands/ended") == {"commands": []}
    assert served.get(looked_at)["finished"]["code"] == 0


def is_connected(port: int, client: int) -> bool:
    """Return whether the server still has the connection from this client port."""
    peers = (line.split()[1:3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ports = [[int(address.partition(":")[2], 16) for address in peer] for peer in peers]
    # Each client has another port, so this finds the server's end of the connection.
    return [port, client] in ports


def test_command_end_is_reported_to_next_client_when_its_stopper_has_gone(served: Served) -> None:
    script = "trap 'echo stopping' TERM; echo ready; until read line; do :; done"
    path = start(served, "sh", "-c", script, stdin="pipe", grace=3600)
    assert served.get(f"{path}/watch?pattern=ready&wait=60")["matched"]
    head = f"POST {path}/stop HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Length: 0\r\n"
    with socket.create_connection(("127.0.0.1", served.port), SECONDS_MAX) as peer:
        peer.sendall(f"{head}Authorization: {AUTHORIZATION['Authorization']}\r\n\r\n".encode())
        assert served.get(f"{path}/watch?pattern=stopping&wait=60")["matched"]
        client = peer.getsockname()[1]
        assert is_connected(served.port, client)
    while is_connected(served.port, client):
        time.sleep(0.01)
    assert served.post("/v1/commands/ended") == {"commands": []}
    served.post(f"{path}/stdin", {"text": "go on\n"})
    ended = served.post("/v1/commands/ended", {"wait": 30})["commands"]
    assert [f"/v1/commands/{each['id']}" for each in ended] == [path]


async def answered(host: Host, method: str, path: str, *, is_gone: bool, query: str = "", **ids: str) -> list[Any]:
    """Return the messages that the API sends to a connected client, or to a client that has gone before the answer."""
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if is_gone:
        lost.set_result(None)
    context = SimpleNamespace(host=host, once=RequestReplay(), proxy=None, is_closing=False)
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "headers": [],
        "query_string": query.encode(),
        "path_params": ids,
        "state": {"connection": SimpleNamespace(lost=lost), "caller": ADMIN},
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await Endpoint([route for route in ROUTES if route.path == path], context, 1000)(scope, receive, send)
    return sent


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("how", ["stop", "look", "ended"])
async def test_command_end_is_taken_only_for_a_connected_client(how: str, is_gone: bool) -> None:
    async with Host("memory:") as host:
        command = await host.start(["true"])
        await command.wait_over()
        if how == "stop":
            sent = await answered(host, "POST", "/v1/commands/{id}/stop", is_gone=is_gone, id=command.id)
        elif how == "look":
            sent = await answered(host, "GET", "/v1/commands/{id}", is_gone=is_gone, id=command.id, query="wait=60")
        else:
            sent = await answered(host, "POST", "/v1/commands/ended", is_gone=is_gone)
        if not is_gone:
            assert sent[0]["status"] == 200
        assert host.take_ended() == ([command] if is_gone else [])


async def test_command_end_taken_before_is_not_reported_again_for_a_gone_client() -> None:
    async with Host("memory:") as host:
        command = await host.start(["true"])
        await command.wait()
        await answered(host, "POST", "/v1/commands/{id}/stop", is_gone=True, id=command.id)
        assert host.take_ended() == []


def test_command_look_without_wait_leaves_the_end_to_be_reported(served: Served) -> None:
    path = start(served, "true")
    read_all(served, path)
    deadline = time.monotonic() + SECONDS_MAX
    while served.get(path)["finished"] is None:
        assert time.monotonic() < deadline
    # Look once more, now that the command is certainly over.
    assert served.get(path)["finished"]["code"] == 0
    taken = served.post("/v1/commands/ended")["commands"]
    assert [f"/v1/commands/{each['id']}" for each in taken] == [path]


@pytest.mark.thorough
def test_command_output_wait_respects_its_timeout(served: Served) -> None:
    path = start(served, "sleep", "1000")
    assert served.get(f"{path}/output?wait=0.05") == {"next": 0, "missed": 0, "end": False, "text": ""}
    assert served.get(f"{path}?wait=0.05")["finished"] is None
    done = served.post(f"{path}/stop")["finished"]
    assert (done["ended"], done["signal"]) == ("stopped", 15)
    assert [step["rung"] for step in done["ladder"]][:1] == ["term"]


def test_command_stdin_round_trips_text_and_bytes(served: Served) -> None:
    path = start(served, "cat", stdin="pipe")
    served.post(f"{path}/stdin", {"text": "grüße\n"})
    served.post(f"{path}/stdin", {"base64": base64.b64encode(b"\xff\x00").decode(), "end": True})
    assert finished(served, path)["code"] == 0
    piece = served.get(f"{path}/output?encoding=base64")
    assert base64.b64decode(piece["base64"]) == "grüße\n".encode() + b"\xff\x00"
    assert served.request("POST", f"{path}/stdin", {"text": "late"}).status == 409
    given = start(served, "cat", stdin={"text": "given"})
    assert read_all(served, given) == "given"
    finished(served, given)


@pytest.mark.thorough
def test_command_output_never_splits_a_character(served: Served) -> None:
    path = start(served, "printf", "äöü€𝄞x")
    finished(served, path)
    assert read_all(served, path, limit=5) == "äöü€𝄞x"
    # A limit below the size of a character still reads to the end.
    assert len(read_all(served, path, limit=1)) == len("äöü€𝄞x".encode())


def test_command_watch_matches_a_pattern_in_output(served: Served) -> None:
    path = start(served, "sh", "-c", "echo starting; echo listening on 8080; sleep 1000")
    found = served.get(f"{path}/watch?pattern=listening%20on%20(%5Cd%2B)&wait=60")
    assert (found["matched"], found["text"], found["groups"]) == (True, "listening on 8080", ["8080"])
    assert served.get(f"{path}/output?after={found['begin']}")["text"].startswith("listening")
    never = served.get(f"{path}/watch?pattern=never&wait=0.05")
    assert (never["matched"], never["end"]) == (False, False)
    assert served.request("GET", f"{path}/watch?pattern=%28").status == 422
    served.post(f"{path}/stop", {"at_once": True})
    assert served.get(f"{path}/watch?pattern=never&wait=60")["end"] is True


def test_command_signal_reaches_its_leader(served: Served) -> None:
    path = start(served, "sh", "-c", "trap 'echo heard; exit 0' USR1; echo ready; while :; do sleep 0.01; done")
    served.get(f"{path}/watch?pattern=ready&wait=60")
    served.post(f"{path}/signal", {"signal": "USR1"})
    assert finished(served, path)["code"] == 0
    assert read_all(served, path) == "ready\nheard\n"
    assert served.request("POST", f"{path}/signal", {"signal": "NONSENSE"}).status == 422
    assert served.request("POST", f"{path}/signal", {"signal": 65}).status == 422


def test_command_terminal_is_resized(served: Served) -> None:
    script = "stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"
    path = start(served, "sh", "-c", script, pty=[30, 100])
    served.get(f"{path}/watch?pattern=ready&wait=60")
    served.post(f"{path}/resize", {"rows": 40, "columns": 120})
    finished(served, path)
    assert read_all(served, path).split() == ["30", "100", "ready", "40", "120"]
    plain = start(served, "sleep", "1000")
    assert served.request("POST", f"{plain}/resize", {"rows": 1, "columns": 1}).status == 422
    served.post(f"{plain}/stop", {"at_once": True})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("user", ["nobody", 65534, "65534"], ids=repr)
def test_command_runs_as_a_user_by_name_or_by_number(served: Served, user: Any) -> None:
    path = start(served, "id", "-u", user=user, cwd="/")
    assert finished(served, path)["code"] == 0
    assert read_all(served, path) == "65534\n"


def test_command_start_refuses_invalid_body(served: Served) -> None:
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"argv": []}, 400),
        ({"argv": ["no-such-program-anywhere"]}, 422),
        ({"argv": ["true"], "cwd": "/nowhere"}, 422),
        ({"argv": ["true"], "stdin": "inherit"}, 400),
        ({"argv": ["true"], "pty": [0, 0]}, 422),
        ({"argv": ["true"], "user": "nobody-of-this-name"}, 422),
        ({"argv": ["true"], "user": "4294967000"}, 422),
        ({"argv": ["true"], "user": -1}, 422),
        ({"argv": ["true"], "user": 1 << 62}, 422),
        ({"argv": ["true"], "user": ""}, 400),
        ({"argv": ["true"], "user": True}, 400),
        ({"argv": ["true"], "user": 1.5}, 400),
        ({"argv": ["true"], "nonsense": 1}, 400),
    ]
    for body, status in bodies:
        answer = served.request("POST", "/v1/commands", body)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), body
        assert answer.json["detail"]
    assert served.request("GET", "/v1/commands/none").status == 404


def test_command_stop_leaves_no_process(served: Served, marker: str) -> None:
    path = start(served, "sh", "-c", f"setsid sleep 1000 {marker} & sleep 1000", env={"MARK": marker})
    done = served.post(f"{path}/stop", {"at_once": True})["finished"]
    assert done["survivors"] == []


# -- the stream of ends ----------------------------------------------------------------------------------------------
def ends(messages: Iterable[Sent]) -> list[tuple[str, Any]]:
    """The command and the code of each end."""
    return [(sent.data["command"]["id"], sent.data["command"]["finished"]["code"]) for sent in messages]


def test_stream_of_commands_has_each_end_once_and_resumes_exactly(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        ids: list[tuple[str, int]] = []
        for code in range(3):
            path = start(served, "sh", "-c", f"exit {code}")
            finished(served, path)
            ids.append((path.rpartition("/")[2], code))
        with served.stream("/v1/commands/events") as stream:
            replayed = stream.until_live()
            assert ends(replayed) == ids
            assert {sent.data["kind"] for sent in replayed} == {"command.ended"}
            assert [sent.data["cursor"] for sent in replayed] == [sent.id for sent in replayed]
            # A live one. The stream leaves the report to `ended`.
            path = start(served, "sh", "-c", "exit 7")
            live = next(sent for sent in stream.messages() if sent.id is not None)
            assert ends([live]) == [(path.rpartition("/")[2], 7)]
        assert [each["id"] for each in served.post("/v1/commands/ended")["commands"]] == [path.rpartition("/")[2]]
        with served.stream("/v1/commands/events", after=replayed[0].id) as stream:
            assert [sent.id for sent in stream.until_live()] == [sent.id for sent in (*replayed[1:], live)]
        with served.stream("/v1/commands/events?after=now") as stream:
            assert stream.until_live() == []
        with served.stream(f"/v1/commands/events?after={live.id}", accept="application/x-ndjson") as stream:
            assert stream.status == 200
        assert served.request("GET", "/v1/commands/events?after=house").status == 422
        assert served.request("GET", "/v1/commands/events?after=0123456789ab.1").status == 410
        name = live.data["cursor"].partition(".")[0]
        assert served.request("GET", f"/v1/commands/events?after={name}.99").status == 410


@pytest.mark.thorough
async def test_registry_numbers_ends_across_those_that_it_forgets() -> None:
    async with Host("memory:") as host:
        registry = host.command_registry
        assert (registry.ends, registry.ended_after(0)) == (0, (1, []))
        waiting = asyncio.ensure_future(registry.wait_past(1))
        first = await host.start(["true"])
        await first.wait()
        assert not waiting.done()
        second = await host.start(["true"])
        await second.wait()
        await waiting
        assert registry.ended_after(0) == (1, [first, second])
        assert registry.ended_after(1) == (2, [second])
        assert registry.ended_after(2) == (3, [])
        for _ in range(256):
            await (await host.start(["true"])).wait()
        number, kept = registry.ended_after(0)
        assert (registry.ends, number, len(kept)) == (258, 3, 256)
