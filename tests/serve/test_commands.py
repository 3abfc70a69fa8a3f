"""Background commands over HTTP: started, read, watched, written to, signalled, resized, stopped."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.kit import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server") as served:
        yield served


def start(served: Served, *argv: str, **more: Any) -> str:
    """A path, for what comes next."""
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


def test_a_command_from_its_start_to_its_end(served: Served, tmp_path: Path) -> None:
    path = start(served, "sh", "-c", "pwd; echo $WORD; echo oops >&2; exit 3", cwd=str(tmp_path), env={"WORD": "said"})
    done = finished(served, path)
    assert (done["ended"], done["code"], done["signal"], done["survivors"]) == ("exited", 3, None, [])
    assert read_all(served, path) == f"{tmp_path}\nsaid\n"
    assert read_all(served, path, stream="stderr") == "oops\n"
    assert path.rpartition("/")[2] in [command["id"] for command in served.get("/v1/commands")["commands"]]


@pytest.mark.thorough
def test_reading_waits_no_longer_than_it_is_told(served: Served) -> None:
    path = start(served, "sleep", "1000")
    assert served.get(f"{path}/output?wait=0.05") == {"next": 0, "missed": 0, "end": False, "text": ""}
    assert served.get(f"{path}?wait=0.05")["finished"] is None
    done = served.post(f"{path}/stop")["finished"]
    assert (done["ended"], done["signal"]) == ("stopped", 15)
    assert [step["rung"] for step in done["ladder"]][:1] == ["term"]


def test_what_is_sent_to_its_stdin_comes_back_whole(served: Served) -> None:
    path = start(served, "cat", stdin="pipe")
    served.post(f"{path}/stdin", {"text": "grüße\n"})
    served.post(f"{path}/stdin", {"base64": base64.b64encode(b"\xff\x00").decode(), "end": True})
    assert finished(served, path)["code"] == 0
    piece = served.get(f"{path}/output?encoding=base64")
    assert base64.b64decode(piece["base64"]) == "grüße\n".encode() + b"\xff\x00"
    assert served.request("POST", f"{path}/stdin", {"text": "late"}).status == 409
    given = start(served, "cat", stdin={"text": "given"})
    assert read_all(served, given) == "given"


@pytest.mark.thorough
def test_a_character_is_not_cut_in_two(served: Served) -> None:
    path = start(served, "printf", "äöü€𝄞x")
    finished(served, path)
    assert read_all(served, path, limit=5) == "äöü€𝄞x"
    # And what is smaller than a character is still read to its end.
    assert len(read_all(served, path, limit=1)) == len("äöü€𝄞x".encode())


def test_watching_tells_when_it_is_ready(served: Served) -> None:
    path = start(served, "sh", "-c", "echo starting; echo listening on 8080; sleep 1000")
    found = served.get(f"{path}/watch?pattern=listening%20on%20(%5Cd%2B)&wait=60")
    assert (found["matched"], found["text"], found["groups"]) == (True, "listening on 8080", ["8080"])
    assert served.get(f"{path}/output?after={found['begin']}")["text"].startswith("listening")
    never = served.get(f"{path}/watch?pattern=never&wait=0.05")
    assert (never["matched"], never["end"]) == (False, False)
    assert served.request("GET", f"{path}/watch?pattern=%28").status == 422
    served.post(f"{path}/stop", {"at_once": True})
    assert served.get(f"{path}/watch?pattern=never&wait=60")["end"] is True


def test_a_signal_goes_to_its_leader(served: Served) -> None:
    path = start(served, "sh", "-c", "trap 'echo heard; exit 0' USR1; echo ready; while :; do sleep 0.01; done")
    served.get(f"{path}/watch?pattern=ready&wait=60")
    served.post(f"{path}/signal", {"signal": "USR1"})
    assert finished(served, path)["code"] == 0
    assert read_all(served, path) == "ready\nheard\n"
    assert served.request("POST", f"{path}/signal", {"signal": "NONSENSE"}).status == 422
    assert served.request("POST", f"{path}/signal", {"signal": 65}).status == 422


def test_a_terminal_has_a_size_and_gets_another(served: Served) -> None:
    script = "stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"
    path = start(served, "sh", "-c", script, pty=[30, 100])
    served.get(f"{path}/watch?pattern=ready&wait=60")
    served.post(f"{path}/resize", {"rows": 40, "columns": 120})
    finished(served, path)
    assert read_all(served, path).split() == ["30", "100", "ready", "40", "120"]
    plain = start(served, "sleep", "1000")
    assert served.request("POST", f"{plain}/resize", {"rows": 1, "columns": 1}).status == 422
    served.post(f"{plain}/stop", {"at_once": True})


def test_what_cannot_be_started_is_the_callers_error(served: Served) -> None:
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"argv": []}, 400),
        ({"argv": ["no-such-program-anywhere"]}, 422),
        ({"argv": ["true"], "cwd": "/nowhere"}, 422),
        ({"argv": ["true"], "stdin": "inherit"}, 400),
        ({"argv": ["true"], "pty": [0, 0]}, 422),
        ({"argv": ["true"], "user": "nobody-of-this-name"}, 422),
        ({"argv": ["true"], "nonsense": 1}, 400),
    ]
    for body, status in bodies:
        answer = served.request("POST", "/v1/commands", body)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), body
        assert answer.json["detail"]
    assert served.request("GET", "/v1/commands/none").status == 404


def test_the_end_of_a_command_leaves_nothing(served: Served, marker: str) -> None:
    path = start(served, "sh", "-c", f"setsid sleep 1000 {marker} & sleep 1000", env={"MARK": marker})
    done = served.post(f"{path}/stop", {"at_once": True})["finished"]
    assert done["survivors"] == []
