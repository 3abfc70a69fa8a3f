"""A session that was handed over, and that the settings of the next server do not allow."""

from __future__ import annotations

from pathlib import Path

from tests.process.helpers import wait_until
from tests.server.http.test_containment_policy import MARK, opened
from tests.server.ops.test_server_hand_over import end, serving
from tests.thorough import thorough


@thorough
def test_process_of_a_refused_session_ends_when_the_session_is_deleted(tmp_path: Path) -> None:
    """The hint of the refusal says so. Until then the process waits for a server with other settings."""
    with serving(tmp_path / "server", callers_choose=["wrap"], hold_seconds=60.0) as served:
        session = opened(served, name="s", wrap=MARK).json["id"]
        served.ask(session, f"@@say begun\n@@wait {tmp_path / 'never'}")
        path = f"/v1/sessions/{session}/events?limit=100"
        # The prompt has it, too.
        wait_until(lambda: str(served.get(path)).count("begun") >= 2, "the turn")
        (pid,) = served.get(f"/v1/sessions/{session}/why")["pids"]
        end(served)
        served.settings["callers_choose"] = []
        served.start()
        answer = served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"})
        assert answer.status == 403
        assert "its wrap is not the one of the settings" in answer.json["detail"]
        assert "or delete the session" in answer.json["hint"]
        assert Path(f"/proc/{pid}").exists()
        assert served.request("DELETE", f"/v1/sessions/{session}?forget=true").status == 204
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")
        log = served.log.read_text(encoding="utf-8")
        assert f"cannot resume session {session}, its asks stay queued: cannot reopen the session" in log
        # A refusal is no bug.
        assert "Traceback" not in log
