"""ACP methods of an editor: initialize, open, load, list, configure, close, delete.

`Methods` turns each call of the editor into requests to the server. `EditorSessions` is the table
of the sessions that the editor has open, and limits how many of them are followed. A prompt is only
registered here: `editor_session.py` sends it. `editor.py` dispatches the calls and handles
`session/cancel`.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from banksman import __version__
from banksman.cli.acp import session_updates
from banksman.cli.acp.backend import Backend
from banksman.cli.acp.editor_session import EditorPrompt, EditorSession, SessionListener
from banksman.cli.acp.session_updates import bad_params
from banksman.cli.client.client import Client, segment
from banksman.cli.client.event_stream import seq_of
from banksman.cli.client.exchange import RequestRefused
from banksman.core.wire.jsonrpc import Id, Notification, RpcCall

# The sessions that one editor has open. All are known, but not all unused ones are followed.
#
# Following a session costs a thread here and a stream in the server. Editors open one session per
# conversation and seldom close any. So only the most recently used ones are followed. Another
# session is followed again, from where it stopped, as soon as the editor uses it.

FOLLOWED_MAX = 64
# A known session costs a few hundred bytes. No editor was seen that opens more.
TALKS_MAX = 10_000

# Each listed session costs two small requests.
PAGE_SESSIONS_MAX = 50
PROTOCOL_VERSION = 1
# Settings of a new session beyond the protocol, in its `_meta.banksman`.
_WISHES = ("agent", "name", "model", "permission_mode", "system_prompt", "options", "rules")


class EditorSessions:
    """Table of the sessions that one editor has open."""

    def __init__(self) -> None:
        # Protects the table. The lock of a session may be taken while this one is held, never the
        # reverse.
        self._lock = threading.Lock()
        self._talks: dict[str, EditorSession] = {}

    def find(self, session: str) -> EditorSession:
        """Return an open session. Raises `EditorRefusal` if the editor has not opened it."""
        with self._lock:
            talk = self._talks.get(session)
        if talk is None:
            raise bad_params(
                f"this editor has not opened session {session!r:.100}",
                "call session/load or session/resume",
            )
        return talk

    def of_request(self, request: Id) -> EditorSession | None:
        """Return the session in which this request is a pending prompt, or None."""
        with self._lock:
            return next((talk for talk in self._talks.values() if talk.has(request)), None)

    def add(self, talk: EditorSession) -> None:
        """Add a session, replacing the editor's previous one with the same id.

        Raises `EditorRefusal` if the previous one is busy.
        """
        with self._lock:
            old = self._talks.get(talk.id)
            if old is not None and old.is_busy:
                raise bad_params(
                    "the session has running prompts of this editor",
                    "wait for them, or cancel them",
                )
            if old is None and len(self._talks) >= TALKS_MAX:
                raise bad_params(
                    f"too many sessions are open ({TALKS_MAX})",
                    "close some, or start another editor",
                )
            self._talks[talk.id] = talk
        if old is not None:
            old.rest()

    def remove(self, session: str) -> None:
        """Forget a session and stop following it."""
        with self._lock:
            talk = self._talks.pop(session, None)
        if talk is not None:
            talk.rest()

    def follow(self, talk: EditorSession) -> None:
        """Follow a session.

        Above the limit, the least recently used idle session stops being followed.
        """
        talk.follow()
        with self._lock:
            followed = [each for each in self._talks.values() if each.is_following]
            idle = [each for each in followed if each is not talk and not each.is_busy]
        if len(followed) > FOLLOWED_MAX and idle:
            min(idle, key=lambda each: each.used).rest()


def list_sessions(client: Client, *, cursor: Any, cwd: Any) -> dict[str, Any]:
    """Return one page of sessions, oldest first.

    `cwd`: only sessions of this folder; None for all.
    """
    for name, value in (("cursor", cursor), ("cwd", cwd)):
        if value is not None and not isinstance(value, str):
            raise bad_params(f"{name} must be a string")
    page = client.get("/v1/sessions", {"after": cursor, "limit": PAGE_SESSIONS_MAX})
    shown = [info for session in page["sessions"] if (info := _info(client, session)) is not None]
    listed: dict[str, Any] = {
        "sessions": [info for info in shown if cwd is None or info["cwd"] == cwd]
    }
    # A page may be short or even empty. Only `nextCursor` says that there is another page.
    if page["next"] is not None:
        listed["nextCursor"] = page["next"]
    return listed


def _info(client: Client, session: dict[str, Any]) -> dict[str, Any] | None:
    """Describe a session for the editor; None if it was just deleted or its folder is unknown."""
    path = f"/v1/sessions/{segment(session['id'])}/events"
    try:
        page = client.get(path, {"limit": 1})
        head = seq_of(page["head"] or "") or 1
        last = client.get(path, {"after": head - 1, "limit": 1})["events"]
    except RequestRefused:
        return None
    cwd = page["events"][0]["body"].get("cwd") if page["events"] else None
    if not isinstance(cwd, str):
        return None
    info = {"sessionId": session["id"], "cwd": cwd, "title": session["name"]}
    if last:
        info["updatedAt"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(last[0]["at"]))
    return info


# The methods that an editor may call, by name. A method gets a request and returns its result. It
# returns None if another part answers the request later.


Method = Callable[[RpcCall], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class SessionDefaults:
    """Defaults of new sessions. `command`: None for the agent's usual command."""

    agent: str
    command: list[str] | None = None


class Methods:
    """The ACP methods of one editor, with its open sessions.

    All methods except `begin_prompt` wait for the server.
    """

    def __init__(self, editor: SessionListener, backend: Backend, usual: SessionDefaults) -> None:
        self._editor = editor
        self._backend = backend
        self._usual = usual
        self.talks = EditorSessions()
        self.named: dict[str, Method] = {
            "initialize": self._initialize,
            "authenticate": self._authenticate,
            "session/new": self._new,
            "session/load": self._load,
            "session/resume": self._resume,
            "session/list": self._list,
            "session/set_mode": self._set_mode,
            "session/set_model": self._set_model,
            "session/set_config_option": self._set_config_option,
            "session/close": self._close,
            "session/delete": self._delete,
        }

    def begin_prompt(self, call: RpcCall) -> tuple[EditorSession, EditorPrompt, list[Any]]:
        """Register a `session/prompt`. Does not wait."""
        talk = self.talks.find(text_of(call, "sessionId"))
        content = call.named.get("prompt")
        blocks = cast("list[Any]", content) if isinstance(content, list) else [None]
        if not all(isinstance(block, dict) for block in blocks):
            raise bad_params("prompt must be a list of content blocks")
        prompt = talk.begin(call.id)
        self.talks.follow(talk)
        return talk, prompt, blocks

    # -- connection -------------------------------------------------------------------------------
    def _initialize(self, _: RpcCall) -> dict[str, Any]:
        agents: list[dict[str, Any]] = self._backend.client.get("/v1/agents")["agents"]
        agent = next((agent for agent in agents if agent["name"] == self._usual.agent), None)
        if agent is None:
            known = ", ".join(agent["name"] for agent in agents)
            raise bad_params(f"unknown agent {self._usual.agent!r:.100}", f"known agents: {known}")
        capabilities: list[str] = agent["capabilities"]
        has_servers = "mcp_servers" in capabilities
        return {
            # Whatever version the editor asked for: this is the only one supported, and an editor
            # that cannot use it disconnects.
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {
                "name": "banksman",
                "title": f"Banksman: {agent['name']}",
                "version": __version__,
            },
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {
                    "image": "images" in capabilities,
                    "audio": False,
                    "embeddedContext": True,
                },
                "mcpCapabilities": {"http": has_servers, "sse": has_servers},
                "sessionCapabilities": {"list": {}, "resume": {}, "close": {}, "delete": {}},
            },
            "authMethods": [],
        }

    def _authenticate(self, _: RpcCall) -> dict[str, Any]:
        """Do nothing.

        The agent has a login and the server a token, and neither concerns the editor.
        """
        return {}

    # -- sessions ---------------------------------------------------------------------------------
    def _new(self, call: RpcCall) -> None:
        body: dict[str, Any] = {"agent": self._usual.agent, "cwd": _folder(call)}
        servers: Any = [] if call.named.get("mcpServers") is None else call.named["mcpServers"]
        if not isinstance(servers, list):
            raise bad_params("mcpServers must be a list")
        if servers:
            body["mcp_servers"] = servers
        wishes = _mapping(_mapping(call.named.get("_meta")).get("banksman"))
        body |= {name: wishes[name] for name in _WISHES if name in wishes}
        if self._usual.command is not None and body["agent"] == self._usual.agent:
            body["command"] = self._usual.command
        session = self._backend.client.post("/v1/sessions", body, key=uuid.uuid4().hex)
        self._take(call, session, {"sessionId": session["id"]})

    def _resume(self, call: RpcCall) -> None:
        self._take(call, self._session(call), {})

    def _take(self, call: RpcCall, session: dict[str, Any], result: dict[str, Any]) -> None:
        talk = EditorSession(
            self._editor, self._backend, session, self._backend.head(session["id"])
        )
        self.talks.add(talk)
        # Answer before the first update, because the editor does not know the session yet.
        self._editor.answer(call.id, result | session_updates.told(talk.settings))
        self.talks.follow(talk)

    def _load(self, call: RpcCall) -> None:
        """Load a session.

        The follower answers the request when it has replayed the whole history.
        """
        session = self._session(call)
        talk = EditorSession(
            self._editor, self._backend, session, self._backend.head(session["id"]), load=call.id
        )
        self.talks.add(talk)
        self.talks.follow(talk)

    def _list(self, call: RpcCall) -> dict[str, Any]:
        return list_sessions(
            self._backend.client, cursor=call.named.get("cursor"), cwd=call.named.get("cwd")
        )

    def _set_mode(self, call: RpcCall) -> dict[str, Any]:
        self._change(call, "permission_mode", text_of(call, "modeId"))
        return {}

    def _set_model(self, call: RpcCall) -> dict[str, Any]:
        self._change(call, "model", text_of(call, "modelId"))
        return {}

    def _set_config_option(self, call: RpcCall) -> dict[str, Any]:
        id = text_of(call, "configId")
        if id not in session_updates.NAMES:
            raise bad_params(
                f"unknown option {id!r:.100}", f"known options: {', '.join(session_updates.NAMES)}"
            )
        name, value = session_updates.NAMES[id], text_of(call, "value")
        talk = self._change(call, name, value)
        # The answer does not wait for the log, which reports the change a moment later.
        return {
            "configOptions": session_updates.config_options(
                session_updates.chosen(talk.settings, name, value)
            )
        }

    def _change(self, call: RpcCall, name: str, value: str) -> EditorSession:
        talk = self.talks.find(text_of(call, "sessionId"))
        self._backend.client.request(
            "PATCH", f"/v1/sessions/{segment(talk.id)}", body={name: value}
        )
        return talk

    def _close(self, call: RpcCall) -> dict[str, Any]:
        """Stop this editor's turns and forget the session.

        The agent's process ends, too, unless another client is using the session.
        """
        talk = self.talks.find(text_of(call, "sessionId"))
        talk.interrupt(talk.cancel())
        self.talks.remove(talk.id)
        path = f"/v1/sessions/{segment(talk.id)}"
        session = self._backend.client.get(path)
        if session["holder"] is None and session["hold"] is None and not session["queue"]:
            self._backend.client.request("DELETE", path)
        return {}

    def _delete(self, call: RpcCall) -> dict[str, Any]:
        session = self._session(call)
        self.talks.remove(session["id"])
        self._backend.client.request(
            "DELETE", f"/v1/sessions/{segment(session['id'])}", query={"forget": 1}
        )
        return {}

    def _session(self, call: RpcCall) -> dict[str, Any]:
        return self._backend.client.get(f"/v1/sessions/{segment(text_of(call, 'sessionId'))}")


def text_of(message: RpcCall | Notification, name: str) -> str:
    """Return a text parameter. Raises `EditorRefusal` if it is missing."""
    value = message.named.get(name)
    if not isinstance(value, str) or not value:
        raise bad_params(f"{name} is missing or not a string")
    return value


def _folder(call: RpcCall) -> str:
    cwd = text_of(call, "cwd")
    if not os.path.isabs(cwd):
        raise bad_params(f"cwd must be an absolute path: {cwd!r:.200}")
    return cwd


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
