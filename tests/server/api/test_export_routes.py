"""Export and bundle over HTTP: complete files, who may have them, and no secret in them."""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.access import tokens
from tests.server.kit import TOKEN, Served, shared

from banksman import Host
from banksman.server.access.roles import Role

SECRET = "a-secret-of-the-settings"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), secrets=[SECRET]) as served:
        yield served


async def test_export_is_the_whole_log_and_can_be_imported(served: Served, tmp_path: Path) -> None:
    session = served.open(name="exported")
    served.outcome(session, served.ask(session, f"say {SECRET}"))
    answer = served.request("GET", "/v1/sessions/exported/export")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert answer.headers["content-disposition"] == f'attachment; filename="{session}.ndjson"'
    assert SECRET.encode() not in answer.body
    header, *lines, end = (json.loads(line) for line in answer.body.splitlines())
    events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    assert [line["seq"] for line in lines] == [event["seq"] for event in events]
    assert (header["id"], end["events"]) == (session, len(events))
    file = tmp_path / "exported.ndjson"
    file.write_bytes(answer.body)
    async with Host("memory:") as host:
        imported = await host.import_session(file)
        assert [event.kind async for event in imported.events(0)][:-1] == [event["kind"] for event in events]


def test_bundle_has_what_a_bug_report_needs_and_no_secret(served: Served) -> None:
    session = served.open(name="bundled")
    served.outcome(session, served.ask(session, f"hello\n@@stderr about {SECRET}\n@@say {SECRET}"))
    answer = served.request("GET", f"/v1/sessions/{session}/bundle")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/zip")
    with zipfile.ZipFile(io.BytesIO(answer.body)) as file:
        assert file.testzip() is None
        found = {name: file.read(name) for name in file.namelist()}
    for name, data in found.items():
        assert SECRET.encode() not in data, name
        assert TOKEN.encode() not in data, name
    manifest = json.loads(found["manifest.json"])
    assert [(each["name"], each["complete"]) for each in manifest["parts"]] == [
        (name, True) for name in found if name != "manifest.json"
    ]
    texts = ("metrics.txt", "stderr.txt")
    facts = ("doctor.json", "manifest.json", "server.json", "stacks.json", "why.json")
    assert sorted(found) == sorted((*facts, *texts, "session.ndjson"))
    assert json.loads(found["why.json"])["id"] == session
    assert json.loads(found["server.json"])["settings"]["store"] == served.settings["store"]
    assert {check["group"] for check in json.loads(found["doctor.json"])["checks"]} >= {"machine", "settings"}
    assert b"banksman_sessions" in found["metrics.txt"]


def test_bundle_without_text_has_no_words(served: Served) -> None:
    session = served.open()
    served.outcome(session, served.ask(session, "extraordinary\n@@say extraordinary"))
    answer = served.request("GET", f"/v1/sessions/{session}/bundle?text=false")
    with zipfile.ZipFile(io.BytesIO(answer.body)) as file:
        assert "stderr.txt" not in file.namelist()
        assert not [name for name in file.namelist() if b"extraordinary" in file.read(name)]


def test_head_of_a_download_has_no_body(served: Served) -> None:
    session = served.open()
    for name in ("export", "bundle"):
        answer = served.request("HEAD", f"/v1/sessions/{session}/{name}")
        assert (answer.status, answer.body) == (200, b"")


def test_export_needs_the_right_to_read_and_bundle_an_operator(served: Served) -> None:
    session = tokens.opened_by(served, "ann", "files-1")
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["vic"]})
    wanted = {
        ("ann", Role.ASKER): (200, 403),
        ("vic", Role.VIEWER): (200, 403),
        ("eve", Role.VIEWER): (404, 404),
        ("oscar", Role.OPERATOR): (200, 200),
    }
    for (name, role), statuses in wanted.items():
        token = tokens.create(served, name, role)
        path = f"/v1/sessions/{session}"
        found = [tokens.request(served, token, "GET", f"{path}/{what}").status for what in ("export", "bundle")]
        assert tuple(found) == statuses, name
    assert served.request("GET", "/v1/sessions/none/export").status == 404


@pytest.mark.thorough
def test_export_ends_when_its_token_is_revoked(served: Served) -> None:
    session = served.open(name="long-1")
    # More than the buffers of both sockets hold, so that the export is still open.
    served.outcome(session, served.ask(session, "x" * (8 << 20)))
    token = tokens.create(served, "leaver", Role.OPERATOR)
    with served.stream(f"/v1/sessions/{session}/export", token=token) as stream:
        last = stream.chunk()
        assert last
        tokens.revoke(served, "leaver")
        with contextlib.suppress(ConnectionResetError):
            while piece := stream.chunk():
                last = piece
                # Slower than the server, which checks the token twice a second.
                time.sleep(0.02)
    assert b'"end":true' not in last
