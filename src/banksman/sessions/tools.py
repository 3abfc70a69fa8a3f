"""Python functions as tools of the agent, and the tasks that answer an agent's callbacks.

`Tool` and `ToolServer` are an MCP server of functions, without a process and without a socket.
`Callbacks` runs every call of the agent into the caller's process: tools, hooks (hooks.py), and
files and terminals (workspace/). The state machine decides which calls run:
`core/session/questions.py`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from banksman.core import json_schema as schemas
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session.effects import CallBack, EndTerminals
from banksman.core.session.facts import CallbackAnswered, TerminalsEnded
from banksman.core.wire.jsonrpc import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND
from banksman.errors import BanksmanError, UsageError
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import (
    CallbackRunner,
    CallUnfinished,
    Hooks,
    RequestTasks,
    check_wait,
    error_text,
    json_copy,
)
from banksman.sessions.workspace import Workspace

# Tools of this program that an agent can call: an MCP server made of functions, without a process
# and without a socket.
#
# The agent's messages arrive one by one, wrapped in its protocol, and `ToolServer.serve` answers
# each. The server implements the required part of MCP: initialize, ping, tools/list, tools/call and
# the cancellation of a call.
#
# **Two kinds of failure**, as MCP defines them. A wrong message is a JSON-RPC error, and the model
# may never see it. A failed call is a result that describes the failure, so that the model can read
# it and correct its call. A call fails if its input does not fit the schema. A call also fails if
# the function raises, takes too long, returns too much or returns a value that cannot be sent.
# Neither kind is raised here.

log = logging.getLogger("banksman")

# Limit of an encoded result. A result is one line to the agent and part of the model's context,
# where a fraction of this is already too much. A larger result was returned by mistake.
RESULT_BYTES_MAX = 4 << 20
# Versions of MCP in which all messages used here have the same meaning. The last is offered to a
# client that requests none of them.
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")

# A list counts as content only if every item is a block: a type of MCP with its required members.
_BLOCKS = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource": ("resource",),
    "resource_link": ("uri", "name"),
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

ToolCall = Callable[[Mapping[str, Any]], "Any | Awaitable[Any]"]


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the agent can call, with its description for the model.

    `schema`: the JSON Schema of the input, which must be an object. `call`: gets only input that
    fits the schema. The function runs in the event loop and must not block. A coroutine function is
    allowed, and is cancelled at its timeout. The result is text, a list of MCP content blocks, or
    any JSON value.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    call: ToolCall

    def __post_init__(self) -> None:
        _check_name("tool", self.name)
        if not isinstance(cast(object, self.description), str):
            message = f"the description of {self.name} cannot be {self.description!r:.60}"
            raise UsageError(message, hint="use text")
        json_copy(self.description)
        if not callable(self.call):
            message = f"the tool {self.name} cannot call {self.call!r:.60}"
            raise UsageError(message, hint="use a function of one argument")
        # A copy, so that the checked schema is the one that the model sees and that its input must
        # fit.
        copy = json_copy(self.schema)
        schemas.check(copy)
        if not isinstance(copy, dict) or cast(dict[str, Any], copy).get("type") != "object":
            hint = 'use {"type": "object", "properties": …}: a tool has named inputs'
            raise UsageError(f"the schema of {self.name} must have the type object", hint=hint)
        object.__setattr__(self, "schema", copy)


def tool(
    *, description: str, schema: Mapping[str, Any], name: str | None = None
) -> Callable[[ToolCall], Tool]:
    """Make a tool of the decorated function. `name` defaults to the function's name."""
    return lambda call: Tool(name or getattr(call, "__name__", ""), description, schema, call)


class ToolServer:
    """Serves tools to one agent.

    Owns the running calls. To end it, cancel `serve` and then await `wait_ended`.
    """

    def __init__(
        self, tools: Sequence[Tool], *, name: str = "tools", seconds: float = 600.0
    ) -> None:
        _check_name("server", name)
        check_wait(seconds)
        self.name = name
        self._seconds = seconds
        self._calls = CallbackRunner()
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(cast(object, each), Tool):
                raise UsageError(f"a tool cannot be {each!r:.60}", hint="use a Tool")
            if each.name in self._tools:
                hint = "give each tool a unique name"
                raise UsageError(f"there are two tools named {each.name}", hint=hint)
            self._tools[each.name] = each

    def __repr__(self) -> str:
        return f"<ToolServer {self.name}: {', '.join(self._tools) or 'no tools'}>"

    async def serve(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to one JSON-RPC message; None if it needs none.

        Never raises. Cancelling this call cancels the tool.
        """
        if not _is_mapping(message):
            return _error(None, INVALID_REQUEST, "the message must be an object")
        id, method, params = (
            message.get("id"),
            message.get("method"),
            _members(message.get("params")),
        )
        known_id = id if _is_id(id) else None
        if message.get("jsonrpc") != "2.0":
            return _error(known_id, INVALID_REQUEST, "the message is not JSON-RPC 2.0")
        if method is None and ("result" in message or "error" in message):
            return None  # An unsolicited response. An answer to it could start an endless exchange.
        if not isinstance(method, str):
            return _error(known_id, INVALID_REQUEST, "the method must be text")
        if "id" not in message:
            # A notification gets no answer. Only a cancellation has a meaning here. A tool call
            # without an id is not executed, because its result could not be delivered.
            if (
                method == "notifications/cancelled"
                and params is not None
                and _is_id(params.get("requestId"))
            ):
                self._calls.cancel(params["requestId"])
            return None
        if known_id is None:
            return _error(None, INVALID_REQUEST, "the id must be text or a whole number")
        if params is None:
            return _error(known_id, INVALID_PARAMS, "the params must be an object")
        match method:
            case "initialize":
                return _response(known_id, self._introduction(params))
            case "ping":
                return _response(known_id, {})
            case "tools/list":
                return _response(
                    known_id, {"tools": [_listed(each) for each in self._tools.values()]}
                )
            case "tools/call":
                return await self._called(known_id, params)
            case _:
                return _error(known_id, METHOD_NOT_FOUND, f"there is no method {method!r:.60}")

    @property
    def is_running(self) -> bool:
        return self._calls.is_running

    async def wait_ended(self) -> None:
        """Wait a limited time until the tools have ended.

        The tool that calls this function is not waited for.
        """
        await self._calls.wait_ended()

    def _introduction(self, params: Mapping[str, Any]) -> dict[str, Any]:
        wanted = params.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[-1],
            "capabilities": {"tools": {}},
            # MCP requires a version, and the tools of a program have none.
            "serverInfo": {"name": self.name, "version": "0"},
        }

    async def _called(self, id: str | int, params: Mapping[str, Any]) -> dict[str, Any]:
        name, given = params.get("name"), _members(params.get("arguments"))
        called = self._tools.get(name) if isinstance(name, str) else None
        if called is None:
            known = ", ".join(self._tools)
            return _error(
                id, INVALID_PARAMS, f"there is no tool {name!r:.60}; known tools: {known}"
            )
        if given is None:
            return _error(id, INVALID_PARAMS, "the arguments must be an object")
        fault = schemas.fault(dict(given), called.schema)
        if fault is not None:
            return _response(id, _failed(f"the input does not match the schema: {fault}"))
        try:
            answer = await self._calls.result(called.call, given, seconds=self._seconds, key=id)
            result = _result(answer)
        except CallUnfinished as exc:
            log.error("tool call %s (tool=%s)", exc, name)
            result = _failed(f"the tool {exc}")
        except Exception as exc:
            log.exception("tool call failed (tool=%s)", name)
            result = _failed(f"the tool failed: {error_text(exc)}")
        return _response(id, result)


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        hint = "use 1 to 64 ASCII letters, digits, _ and -"
        raise UsageError(f"a {what} cannot be named {name!r:.80}", hint=hint)


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _members(value: object) -> Mapping[str, Any] | None:
    """Return an optional object's members; None if the value is not an object."""
    return {} if value is None else value if _is_mapping(value) else None


def _is_id(value: object) -> TypeGuard[str | int]:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _listed(each: Tool) -> dict[str, Any]:
    return {"name": each.name, "description": each.description, "inputSchema": each.schema}


def _result(answer: object) -> dict[str, Any]:
    """Convert the return value of a function to the result of a call.

    Raises `UsageError` if it cannot be sent.
    """
    value = json_copy(answer)
    result: dict[str, Any]
    if isinstance(value, str):
        result = {"content": [_text(value)]}
    elif _is_content(value):
        result = {"content": value}
    else:
        result = {"content": [_text(json.dumps(value, ensure_ascii=False))]}
        # In addition to the text, for clients that support it. Older versions of MCP ignore it.
        if isinstance(value, dict):
            result["structuredContent"] = value
    size = len(json.dumps(result, ensure_ascii=False).encode())
    if size > RESULT_BYTES_MAX:
        hint = f"return at most {RESULT_BYTES_MAX} bytes, or the path of a file"
        raise UsageError(f"the result is too large: {size} bytes", hint=hint)
    return result


def _is_content(value: object) -> bool:
    blocks = cast(list[Any], value) if isinstance(value, list) else []
    return bool(blocks) and all(_is_block(block) for block in blocks)


def _is_block(value: object) -> bool:
    kind = value.get("type") if _is_mapping(value) else None
    members = _BLOCKS.get(kind) if isinstance(kind, str) else None
    return members is not None and all(name in cast(Mapping[str, Any], value) for name in members)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _failed(why: str) -> dict[str, Any]:
    return {"content": [_text(why)], "isError": True}


def _response(id: str | int, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def _error(id: str | int | None, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}


# Calls of the agent into the caller's process: hooks, tools, and requests for files and terminals.
# Each call is a task that ends with its request.


class Callbacks:
    """Callbacks of one session.

    Owns the tasks of the calls. `hooks`, `server` and `workspace` are the targets of the calls.
    """

    def __init__(self, driver: Driver, hooks: Hooks, server: ToolServer) -> None:
        self._driver = driver
        self.hooks = hooks
        self.server = server
        # The workspace of the running process, if its dialect has one.
        self.workspace: Workspace | None = None
        # Replaced targets that may still have cancelled calls running.
        self._former: list[Hooks | ToolServer | Workspace] = []
        self._tasks = RequestTasks("callback")

    def replace(self, hooks: Hooks, server: ToolServer) -> None:
        if hooks is not self.hooks:
            # Keep only targets with running calls, because a session may be opened again many
            # times.
            self._former = [
                each for each in (*self._former, self.hooks, self.server) if each.is_running
            ]
        self.hooks, self.server = hooks, server

    def work_in(self, workspace: Workspace | None) -> None:
        """Set the workspace of a new process, and end the workspace of the previous process."""
        former, self.workspace = self.workspace, workspace
        if former is not None:
            former.end()
            self._former = [each for each in (*self._former, former) if each.is_running]

    def end_terminals(self, effect: EndTerminals) -> None:
        """End or report the agent's terminals, because their turn is interrupted."""
        if self.workspace is None:
            return
        commands = self.workspace.stop_terminals(effect.since, ends=effect.ends)
        if commands:
            now = self._driver.now()
            self._driver.dispatch(TerminalsEnded(now, effect.process, effect.turn, commands))

    def call(self, effect: CallBack) -> None:
        # A separate task, so that user code never runs inside `dispatch`.
        answer = self._answering(effect.asked)
        request = effect.asked.request
        self._tasks.start(request, self._call(effect.process, request, answer))

    async def _call(
        self, process: int, request: str, answer: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> None:
        response: Mapping[str, Any] | None = None
        error = ""
        try:
            response = await answer()
        except BanksmanError as exc:
            error = str(exc)
        except BaseException as exc:
            error = f"the callback ended by {type(exc).__name__}"
            raise
        finally:
            # In every case: an agent without an answer waits forever.
            self._driver.dispatch(
                CallbackAnswered(self._driver.now(), process, request, response, error)
            )

    def _answering(self, asked: Requested) -> Callable[[], Awaitable[Mapping[str, Any]]]:
        """Return the function that answers a request.

        For a workspace request, the current workspace and its generation are bound now, because the
        task starts later. An interrupt in between then also cancels this request.
        """
        if asked.wants is RequestPurpose.WORKSPACE and self.workspace is not None:
            return self.workspace.serving(asked.subtype, asked.input)
        return functools.partial(self._answer, asked)

    async def _answer(self, asked: Requested) -> Mapping[str, Any]:
        if asked.wants is RequestPurpose.HOOK:
            return await self.hooks.call(asked.tool, asked.input)
        if asked.wants is RequestPurpose.WORKSPACE:
            hint = "this session serves no files and no terminals"
            raise UsageError(f"{asked.subtype!r:.60} is not served here", hint=hint)
        if asked.tool != self.server.name:
            raise UsageError(
                f"there is no server {asked.tool!r:.60}", hint=f"use {self.server.name}"
            )
        response = await self.server.serve(asked.input)
        # The agent waits for an answer even where MCP defines none.
        return {"jsonrpc": "2.0", "id": 0, "result": {}} if response is None else response

    @property
    def obstacle(self) -> str:
        """Why another host cannot continue the calls of the agent; empty if it can."""
        has_terminals = self.workspace is not None and self.workspace.has_terminals
        return "the agent uses terminals of this host" if has_terminals else ""

    def close(self, request: str) -> None:
        self._tasks.cancel(request)

    def end(self) -> None:
        self._tasks.cancel_all()
        if self.workspace is not None:
            self.workspace.end()

    def lose(self, kill_by: float) -> None:
        """End the terminals after the loss of ownership.

        They must end by the same deadline as the agent's process.
        """
        for each in (self.workspace, *self._former):
            if isinstance(each, Workspace):
                each.end(kill_by)

    def abandon(self) -> None:
        """Drop the workspaces because the event loop is closed, so that nothing can be awaited."""
        for each in (self.workspace, *self._former):
            if isinstance(each, Workspace):
                each.abandon()

    async def wait_ended(self) -> None:
        """Wait until the callbacks have ended. The wait is limited: see `CallbackRunner`.

        After that no process of a terminal is left.
        """
        workspaces = () if self.workspace is None else (self.workspace,)
        await asyncio.gather(
            *(each.wait_ended() for each in (self.hooks, self.server, *workspaces, *self._former))
        )
