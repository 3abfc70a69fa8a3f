"""The agent's open questions in one session: how the editor is asked, and how its answer goes to the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from banksman.cli.acp.backend import AWAY_SECONDS, AWAY_SECONDS_MAX, Backend
from banksman.cli.client.client import ClientError, NoServer, segment
from banksman.cli.output import as_line, say_aside
from banksman.core.wire.jsonrpc import Failure, RpcReply
from banksman.errors import BanksmanError

Option = dict[str, str]

_CALLS = ("toolCallId", "tool_use_id", "itemId")
_TOOL_KINDS = ("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other")
_KINDS = ("allow_once", "allow_always", "reject_once", "reject_always")
# For an agent that offers none of its own. What is allowed for the session is remembered by the agent, and no longer.
_USUAL: tuple[Option, ...] = (
    {"optionId": "allow_once", "name": "Allow", "kind": "allow_once"},
    {"optionId": "allow_always", "name": "Allow for this session", "kind": "allow_always"},
    {"optionId": "reject_once", "name": "Reject", "kind": "reject_once"},
)


def request_of(session: str, question: Mapping[str, Any], title_of: Callable[[Any], str | None]) -> dict[str, Any]:
    """The parameters of a `session/request_permission`. `title_of`: of a tool call that the editor knows already."""
    call = _tool_call(question)
    title = title_of(call["toolCallId"])
    if title is not None:
        call["title"] = title
    return {"sessionId": session, "toolCall": call, "options": list(offered(question) or _USUAL)}


def offered(question: Mapping[str, Any]) -> list[Option]:
    """The options that the agent itself gives."""
    options = _mapping(question.get("details")).get("options")
    found = [_mapping(option) for option in cast("list[Any]", options)] if isinstance(options, list) else []
    return [
        {"optionId": option["optionId"], "name": option["name"], "kind": option["kind"]}
        for option in found
        if option.get("kind") in _KINDS and all(isinstance(option.get(each), str) for each in ("optionId", "name"))
    ]


def answer(question: Mapping[str, Any], result: Any) -> dict[str, Any] | None:
    """The body of an answer; None: the editor has none to give. It says `cancelled` when it stops the turn, which is
    told on its own and closes the question for everybody; and nobody else's answer is taken away by one who left.

    An answer that was not offered is a denial, with a message that says so: the editor believes that it has answered,
    and the turn would wait for ever."""
    outcome = _mapping(_mapping(result).get("outcome"))
    chosen = outcome.get("optionId")
    if outcome.get("outcome") == "cancelled":
        return None
    own = offered(question)
    option = next((option for option in own or _USUAL if option["optionId"] == chosen), None)
    if option is None or outcome.get("outcome") != "selected":
        said = f"the option {chosen!r:.100}" if isinstance(chosen, str) else "no option"
        return {"decision": "deny", "message": f"denied: the editor chose {said}, which was not offered"}
    if own:
        return {"decision": option["optionId"]}
    if not option["kind"].startswith("allow"):
        return {"decision": "deny"}
    return {"decision": "allow", "remember": True} if option["kind"] == "allow_always" else {"decision": "allow"}


def refused(failure: Failure) -> dict[str, Any]:
    """The body of an answer where the editor gave none, but an error: a denial, with a message that says so."""
    return {
        "decision": "deny",
        "message": f"denied: the editor answered by the error {failure.code} {failure.message!r:.100}",
    }


def _tool_call(question: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent itself said of the call, as far as an editor understands it; each dialect names the call in its
    own way."""
    details = _mapping(question.get("details"))
    call = next((details[name] for name in _CALLS if isinstance(details.get(name), str)), question["question"])
    tool = str(question.get("tool") or question.get("wants") or "permission")
    title = details.get("title") or details.get("display_name")
    return {
        "toolCallId": call,
        "title": title if isinstance(title, str) else tool,
        "status": "pending",
        "rawInput": question.get("input"),
        **({"kind": tool} if tool in _TOOL_KINDS else {}),
        **{name: details[name] for name in ("content", "locations") if isinstance(details.get(name), list)},
    }


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


# The questions that are open in one session, as one editor is asked them.
#
# Whoever follows the session is asked, each editor and each person at a page or a shell, and the first answer is the
# question's one answer; the server says whose that was. So here it is only seen to it that an editor is asked what is
# still open, once, and need not go on asking its user when somebody else was faster.

Answer = Callable[[RpcReply], None]


class QuestionSender(Protocol):
    """The editor, as far as it can be asked something."""

    def ask(self, method: str, params: dict[str, Any], on_reply: Answer) -> int | None: ...
    def withdraw(self, id: int) -> None: ...


class EditorQuestions:
    """`title_of`: what a tool call is called that the editor knows already. `on_asked` and `on_answered` are for the
    thread that follows the session, and never wait for the server."""

    def __init__(
        self, editor: QuestionSender, backend: Backend, session: str, title_of: Callable[[Any], str | None]
    ) -> None:
        self._editor = editor
        self._backend = backend
        self._session = session
        self._path = f"/v1/sessions/{segment(session)}/questions"
        self._title_of = title_of
        # For the table: those that are open, and the requests by which the editor was asked; None: it was not, or has
        # answered. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._open: dict[str, int | None] = {}

    @property
    def are_open(self) -> bool:
        with self._lock:
            return bool(self._open)

    def on_asked(self, question: str, *, waits: bool) -> None:
        """`waits`: the editor is still being told what was before; see `put_all`."""
        with self._lock:
            self._open[question] = None
        if not waits:
            self._begin(question)

    def on_answered(self, question: str) -> None:
        """By whoever came first. If that was not this editor, it need not ask its user any more."""
        with self._lock:
            request = self._open.pop(question, None)
        if request is not None:
            self._editor.withdraw(request)

    def put_all(self) -> None:
        """Those that nobody has answered by now."""
        with self._lock:
            waiting = list(self._open)
        for question in waiting:
            self._begin(question)

    def _begin(self, question: str) -> None:
        threading.Thread(target=self._put, args=(question,), name="banksman-acp question", daemon=True).start()

    def _put(self, question: str) -> None:
        """Put it to the editor, if it is still open: most are answered by a rule in the moment in which they are asked,
        and a window that opens and closes again is no service to anybody."""
        listed = self._listed(question)
        asked = next((each for each in listed if each["id"] == question), None)
        if asked is None:
            return
        if asked["wants"] != "permission":
            say_aside(f"banksman: an editor cannot be asked this: see banksman answer {self._session} {question}")
            return
        asked = {**asked, "question": question}
        params = request_of(self._session, asked, self._title_of)
        request = self._editor.ask("session/request_permission", params, lambda reply: self._on_reply(asked, reply))
        with self._lock:
            is_open = question in self._open
            if is_open:
                self._open[question] = request
        if not is_open and request is not None:
            # Answered elsewhere in between, and then there was nothing yet to take back.
            self._editor.withdraw(request)

    def _listed(self, question: str) -> list[dict[str, Any]]:
        """Those that wait for an answer. A server that is away is waited for: the question may still be open in the
        next one."""
        deadline = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                return self._backend.client.get(self._path)["questions"]
            except NoServer as exc:
                with self._lock:
                    is_open = question in self._open
                if not is_open or time.monotonic() > deadline:
                    say_aside(f"banksman: question {question} cannot be looked at: {exc}")
                    return []
            except BanksmanError as exc:
                say_aside(f"banksman: question {question} cannot be looked at: {exc}")
                return []
            time.sleep(AWAY_SECONDS)

    def _on_reply(self, asked: dict[str, Any], reply: RpcReply) -> None:
        """The editor's answer. It is the question's only if it is the first."""
        failure = reply.error
        body = answer(asked, reply.result) if failure is None else refused(failure)
        if body is None:
            return
        if "message" in body:
            say_aside(f"banksman: question {asked['question']}: {as_line(body['message'])}")
        try:
            self._backend.insist(f"{self._path}/{segment(asked['question'])}", body)
        except ClientError as exc:
            say_aside(f"banksman: question {asked['question']} could not be answered: {exc}")
