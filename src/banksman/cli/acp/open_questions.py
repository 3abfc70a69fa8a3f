"""Forward the agent's permission questions to the editor, and the editor's answers to the server.

The functions translate between a question and the ACP request `session/request_permission`.
`EditorQuestions` sends these requests in threads, waits for a missing server, and withdraws a
request if another client answers first. The editor cannot show any other question (an elicitation):
stderr names the `banksman answer` call for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from banksman.cli.acp.backend import AWAY_SECONDS, AWAY_SECONDS_MAX, Backend
from banksman.cli.client.client import segment
from banksman.cli.client.exchange import ClientError, NoServer
from banksman.cli.output import as_line, say_aside
from banksman.core.wire.jsonrpc import Failure, RpcReply
from banksman.errors import BanksmanError

Option = dict[str, str]

_CALLS = ("toolCallId", "tool_use_id", "itemId")
_TOOL_KINDS = (
    "read",
    "edit",
    "delete",
    "move",
    "search",
    "execute",
    "think",
    "fetch",
    "switch_mode",
    "other",
)
_KINDS = ("allow_once", "allow_always", "reject_once", "reject_always")
# Options for an agent that gives none. The agent remembers "allow for this session", for this
# session only.
_USUAL: tuple[Option, ...] = (
    {"optionId": "allow_once", "name": "Allow", "kind": "allow_once"},
    {"optionId": "allow_always", "name": "Allow for this session", "kind": "allow_always"},
    {"optionId": "reject_once", "name": "Reject", "kind": "reject_once"},
)


def request_of(
    session: str, question: Mapping[str, Any], title_of: Callable[[Any], str | None]
) -> dict[str, Any]:
    """Build the parameters of `session/request_permission`.

    `title_of`: returns the title of a tool call that the editor already knows.
    """
    call = _tool_call(question)
    title = title_of(call["toolCallId"])
    if title is not None:
        call["title"] = title
    return {"sessionId": session, "toolCall": call, "options": list(offered(question) or _USUAL)}


def offered(question: Mapping[str, Any]) -> list[Option]:
    """Return the options that the agent gives, if they are valid."""
    options = _mapping(question.get("details")).get("options")
    found = (
        [_mapping(option) for option in cast("list[Any]", options)]
        if isinstance(options, list)
        else []
    )
    return [
        {"optionId": option["optionId"], "name": option["name"], "kind": option["kind"]}
        for option in found
        if option.get("kind") in _KINDS
        and all(isinstance(option.get(each), str) for each in ("optionId", "name"))
    ]


def answer(question: Mapping[str, Any], result: Any) -> dict[str, Any] | None:
    """Return the body of an answer; None if the editor gave none.

    An editor says `cancelled` when it stops the turn. The stop arrives separately and closes the
    question for all clients. Until then another client may still answer it.

    A choice that was not offered becomes a denial with a message. The editor believes that it has
    answered, so the turn would otherwise wait forever.
    """
    outcome = _mapping(_mapping(result).get("outcome"))
    chosen = outcome.get("optionId")
    if outcome.get("outcome") == "cancelled":
        return None
    own = offered(question)
    option = next((option for option in own or _USUAL if option["optionId"] == chosen), None)
    if option is None or outcome.get("outcome") != "selected":
        said = f"the option {chosen!r:.100}" if isinstance(chosen, str) else "no option"
        return {
            "decision": "deny",
            "message": f"denied: the editor chose {said}, which was not offered",
        }
    if own:
        return {"decision": option["optionId"]}
    if not option["kind"].startswith("allow"):
        return {"decision": "deny"}
    return (
        {"decision": "allow", "remember": True}
        if option["kind"] == "allow_always"
        else {"decision": "allow"}
    )


def refused(failure: Failure) -> dict[str, Any]:
    """Return a denial with a message, for an editor that answered with an error."""
    return {
        "decision": "deny",
        "message": (
            f"denied: the editor answered with error {failure.code} {failure.message!r:.100}"
        ),
    }


def _tool_call(question: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tool call from the agent's details, as far as ACP has a field for them.

    Each dialect has a different member for the id of the call.
    """
    details = _mapping(question.get("details"))
    call = next(
        (details[name] for name in _CALLS if isinstance(details.get(name), str)),
        question["question"],
    )
    tool = str(question.get("tool") or question.get("wants") or "permission")
    title = details.get("title") or details.get("display_name")
    return {
        "toolCallId": call,
        "title": title if isinstance(title, str) else tool,
        "status": "pending",
        "rawInput": question.get("input"),
        **({"kind": tool} if tool in _TOOL_KINDS else {}),
        **{
            name: details[name]
            for name in ("content", "locations")
            if isinstance(details.get(name), list)
        },
    }


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


# The open questions of one session, as one editor gets them.
#
# Every client that follows the session gets the question: editors, the page, a shell. The first
# answer counts, and the server reports which client gave it. An editor gets each open question
# once. When another client was faster, the editor's request is withdrawn.

Answer = Callable[[RpcReply], None]


class QuestionSender(Protocol):
    """The part of the editor connection that sends requests to the editor."""

    def ask(self, method: str, params: dict[str, Any], on_reply: Answer) -> int | None: ...
    def withdraw(self, id: int) -> None: ...


class EditorQuestions:
    """The open questions of one session, as one editor gets them.

    `title_of`: returns the title of a tool call that the editor already knows. The thread that
    follows the session calls `on_asked` and `on_answered`; they never wait for the server.
    """

    def __init__(
        self,
        editor: QuestionSender,
        backend: Backend,
        session: str,
        title_of: Callable[[Any], str | None],
    ) -> None:
        self._editor = editor
        self._backend = backend
        self._session = session
        self._path = f"/v1/sessions/{segment(session)}/questions"
        self._title_of = title_of
        # Protects the table of open questions. Each maps to the request sent to the editor; None if
        # it was not sent yet or is answered. No function is called while the lock is held.
        self._lock = threading.Lock()
        self._open: dict[str, int | None] = {}

    @property
    def are_open(self) -> bool:
        """Whether any question is open."""
        with self._lock:
            return bool(self._open)

    def on_asked(self, question: str, *, waits: bool) -> None:
        """Record a new question and send it.

        `waits`: the editor is still loading the history; `put_all` sends the question later.
        """
        with self._lock:
            self._open[question] = None
        if not waits:
            self._begin(question)

    def on_answered(self, question: str) -> None:
        """Record the answer of any client.

        Withdraws the request if the editor has not answered it.
        """
        with self._lock:
            request = self._open.pop(question, None)
        if request is not None:
            self._editor.withdraw(request)

    def put_all(self) -> None:
        """Send all questions that are still open."""
        with self._lock:
            waiting = list(self._open)
        for question in waiting:
            self._begin(question)

    def _begin(self, question: str) -> None:
        threading.Thread(
            target=self._put, args=(question,), name="banksman-acp question", daemon=True
        ).start()

    def _put(self, question: str) -> None:
        """Send the question to the editor, if it is still open.

        Rules answer most questions in the moment they are asked. The check keeps the editor from
        opening a window and closing it again.
        """
        listed = self._listed(question)
        asked = next((each for each in listed if each["id"] == question), None)
        if asked is None:
            return
        if asked["wants"] not in ("permission", "budget"):
            say_aside(
                "banksman: an editor cannot show this question: "
                f"run banksman answer {self._session} {question}"
            )
            return
        asked = {**asked, "question": question}
        params = request_of(self._session, asked, self._title_of)
        request = self._editor.ask(
            "session/request_permission", params, lambda reply: self._on_reply(asked, reply)
        )
        with self._lock:
            is_open = question in self._open
            if is_open:
                self._open[question] = request
        if not is_open and request is not None:
            # Another client answered between the check and the request. At that time there was no
            # request that `on_answered` could withdraw.
            self._editor.withdraw(request)

    def _listed(self, question: str) -> list[dict[str, Any]]:
        """Return the open questions.

        Waits for a missing server, because the next one may still have them.
        """
        deadline = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                return self._backend.client.get(self._path)["questions"]
            except NoServer as exc:
                with self._lock:
                    is_open = question in self._open
                if not is_open or time.monotonic() > deadline:
                    say_aside(f"banksman: cannot read question {question}: {exc}")
                    return []
            except BanksmanError as exc:
                say_aside(f"banksman: cannot read question {question}: {exc}")
                return []
            time.sleep(AWAY_SECONDS)

    def _on_reply(self, asked: dict[str, Any], reply: RpcReply) -> None:
        """Send the editor's answer to the server. It counts only if it is the first."""
        failure = reply.error
        body = answer(asked, reply.result) if failure is None else refused(failure)
        if body is None:
            return
        if "message" in body:
            say_aside(f"banksman: question {asked['question']}: {as_line(body['message'])}")
        try:
            self._backend.insist(f"{self._path}/{segment(asked['question'])}", body)
        except ClientError as exc:
            say_aside(f"banksman: cannot answer question {asked['question']}: {exc}")
