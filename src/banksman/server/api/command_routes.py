"""Commands over HTTP: start, list, read, write, signal, resize, stop, and wait for a pattern.

The end of a command is reported once: to a request that waited for it or stopped it, or by
`take_ended`. A report that could not be sent is given back. A command lives as long as the server
at most. Its output and its result are kept for a while after its end: see Host.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from banksman import Command, Piece
from banksman.server.access.roles import Action
from banksman.server.api.messages import command_messages as messages
from banksman.server.api.messages.common_messages import WAIT_SECONDS_MAX, WaitFor
from banksman.server.api.route import HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.problems import Problem

# Limit of one piece of output.
OUTPUT_BYTES_MAX = 1 << 20
# How long a write to stdin waits for a command that does not read it.
STDIN_SECONDS_MAX = 30.0


async def start(call: RouteCall) -> HttpAnswer:
    """Start a command in the background."""
    context: Context = call.context
    body: messages.StartCommand = call.body

    async def do() -> HttpAnswer:
        policy = context.policy
        command = await context.host.start(
            policy.command(body.argv),
            cwd=policy.folder(body.cwd),
            env=policy.env(body.env),
            inherit_env=body.inherit_env,
            # The server's variables may hold its token, the address of its store, and the keys of
            # its agents. They are not the caller's.
            scrub=("banksman", "secrets"),
            timeout=body.timeout,
            idle_timeout=body.idle_timeout,
            grace=body.grace,
            stdin=_stdin(body.stdin),
            user=policy.user(body.user),
            output_bytes_max=body.output_bytes_max,
            pty=body.pty if isinstance(body.pty, bool) else (body.pty[0], body.pty[1]),
            caller=call.caller.name,
        )
        return HttpAnswer(shown(command), 201, {"Location": f"/v1/commands/{command.id}"})

    return await context.once.do("commands", call.key, body, do)


async def list_commands(call: RouteCall) -> HttpAnswer:
    """List the commands that run, and those that have ended and are still kept."""
    return HttpAnswer(
        messages.Commands([shown(command) for command in call.context.host.commands()])
    )


async def take_ended(call: RouteCall) -> HttpAnswer:
    """Take the commands that have ended and were not reported before.

    Each end is reported once: here, or by the request that waited for it or stopped the command.
    """
    context: Context = call.context
    body: messages.TakeEnded = call.body

    async def do() -> HttpAnswer:
        ended = context.host.take_ended()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(body.wait, WAIT_SECONDS_MAX)):
                ended = ended or await context.host.wait_ended()
        # With a key the response is stored, and the client can request it again. Without one, an
        # unsent response must return its reports.
        return _reported(
            messages.Commands([shown(command) for command in ended]), [] if call.key else ended
        )

    return await context.once.do("commands/ended", call.key, body, do)


async def look(call: RouteCall) -> HttpAnswer:
    """Show a command; with `wait`, wait for its end."""
    command = _command(call)
    query: WaitFor = call.query
    # A request that waits for the end takes its one report, as `wait` does. A request without
    # `wait` leaves the report.
    if query.wait > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(query.wait, WAIT_SECONDS_MAX)):
                await command.wait_over()
                return _ended(command)
    elif command.is_over:
        command.result()  # Raises the error of a failed start.
    return HttpAnswer(shown(command))


async def read(call: RouteCall) -> HttpAnswer:
    """Read the output of a command from an offset."""
    command = _command(call)
    query: messages.ReadOutput = call.query
    _one_of("encoding", query.encoding, "text", "base64")
    limit = min(query.limit, OUTPUT_BYTES_MAX)
    piece = Piece(b"", query.after, 0, is_end=False)
    # A timeout without output gives an empty piece.
    with suppress(TimeoutError):
        async with asyncio.timeout(min(query.wait, WAIT_SECONDS_MAX)):
            piece = await command.read(after=query.after, stream=query.stream, bytes_max=limit)
            if (
                query.encoding == "text"
                and not piece.is_end
                and _cut(piece.data) == len(piece.data) < limit
            ):
                # Only the first bytes of a character have arrived: wait for the rest of it.
                await command.read(after=piece.next, stream=query.stream)
                piece = await command.read(after=query.after, stream=query.stream, bytes_max=limit)
    if query.encoding == "base64":
        data = base64.b64encode(piece.data).decode()
        return HttpAnswer(messages.OutputPiece(piece.next, piece.missed, piece.is_end, base64=data))
    # Leave an incomplete character for the next piece, unless `limit` is too small for a whole one.
    cut = 0 if piece.is_end or len(piece.data) >= limit == _cut(piece.data) else _cut(piece.data)
    whole = piece.data[: len(piece.data) - cut]
    return HttpAnswer(
        messages.OutputPiece(
            piece.next - cut, piece.missed, piece.is_end, text=whole.decode(errors="replace")
        )
    )


async def watch(call: RouteCall) -> HttpAnswer:
    """Wait until the output matches a pattern, the command ends, or the time is up."""
    command = _command(call)
    query: messages.WatchOutput = call.query
    timeout = min(query.wait, WAIT_SECONDS_MAX)
    found = await command.watch(
        query.pattern, after=query.after, stream=query.stream, timeout=timeout
    )
    if found is None:
        return HttpAnswer(messages.Matched(False, None, None, None, [], command.is_over))
    return HttpAnswer(
        messages.Matched(
            True, found.begin, found.next, found.text, list(found.groups), command.is_over
        )
    )


async def write(call: RouteCall) -> HttpAnswer:
    """Write to the stdin of a command, or close it."""
    command = _command(call)
    body: messages.WriteStdin = call.body
    if body.text is not None or body.base64 is not None:
        await command.write(_bytes(body), timeout=STDIN_SECONDS_MAX)
    if body.end:
        await command.close_stdin()
    return HttpAnswer(shown(command))


async def send_signal(call: RouteCall) -> HttpAnswer:
    """Send a signal to a command."""
    command = _command(call)
    body: messages.SendSignal = call.body
    await command.signal(_signal(body.signal), group=body.group)
    return HttpAnswer(shown(command))


async def resize(call: RouteCall) -> HttpAnswer:
    """Resize the terminal of a command."""
    command = _command(call)
    body: messages.Resize = call.body
    await command.resize(body.rows, body.columns)
    return HttpAnswer(shown(command))


async def stop(call: RouteCall) -> HttpAnswer:
    """Stop a command and all its processes. Responds when it has ended."""
    command = _command(call)
    body: messages.StopCommand = call.body
    # Not `command.stop()`, which takes the report: a stop continues without its client, and may
    # take longer than the client waits.
    command.stop_nowait(at_once=body.at_once)
    await command.wait_over()
    return _ended(command)


def _ended(command: Command) -> HttpAnswer:
    """Respond with the one report of a command's end."""
    is_news = command.take_report()
    command.result()  # Raises the error of a failed start.
    return _reported(shown(command), [command] if is_news else [])


def _reported(value: Any, ended: Sequence[Command]) -> HttpAnswer:
    """Respond with these ends. If the client has disconnected, the next request reports them."""

    def give_back() -> None:
        for command in ended:
            command.return_report()

    return HttpAnswer(value, on_unsent=give_back if ended else None)


def shown(command: Command) -> messages.Command:
    """Convert a command to its message."""
    done = command.finished
    finished = None
    if done is not None:
        finished = messages.Finished(
            ended=str(done.ended),
            code=done.code,
            signal=done.signal,
            seconds=done.seconds,
            drained=done.drained,
            swept=[messages.Swept(swept.pid, swept.command) for swept in done.swept],
            survivors=[
                messages.Survivor(left.pid, left.command, left.why) for left in done.survivors
            ],
            ladder=[messages.Step(step.rung, step.at) for step in done.ladder],
        )
    return messages.Command(
        *(command.id, list(command.argv), str(command.state), command.pid, finished),
        caller=command.caller,
    )


def _command(call: RouteCall) -> Command:
    return call.context.host.command(call.path["id"])


def _stdin(given: str | messages.Given | None) -> Any:
    if isinstance(given, messages.Given):
        return _bytes(given)
    if given not in (None, "pipe"):
        raise Problem(
            400,
            "BadRequest",
            'stdin must be null, "pipe", {"text": …} or {"base64": …}',
            hint="see /openapi.json",
        )
    return given


def _bytes(given: messages.Given) -> bytes:
    if (given.text is None) == (given.base64 is None):
        hint = "see /openapi.json"
        raise Problem(400, "BadRequest", "pass exactly one of text and base64", hint=hint)
    if given.text is not None:
        return given.text.encode()
    try:
        return base64.b64decode(given.base64 or "", validate=True)
    except (binascii.Error, ValueError) as exc:
        hint = "see RFC 4648"
        raise Problem(400, "BadRequest", f"cannot decode base64: {exc}", hint=hint) from exc


def _signal(given: int | str) -> int:
    if isinstance(given, int):
        return given
    name = given.upper().removeprefix("SIG")
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError as exc:
        raise Problem(
            422,
            "UsageError",
            f"unknown signal {given!r:.40}",
            hint='pass a name such as "INT", or a number',
        ) from exc


def _cut(data: bytes) -> int:
    """Return how many bytes at the end of the data belong to an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-4:])
    return len(decoder.getstate()[0])


def _one_of(name: str, value: str, *known: str) -> None:
    if value not in known:
        hint = f"pass {' or '.join(known)}"
        raise Problem(400, "BadRequest", f"unknown {name} {value!r:.40}", hint=hint)


ID = "/v1/commands/{id}"
ROUTES = (
    Route(
        method="POST",
        path="/v1/commands",
        action=Action.OPERATE,
        handle=start,
        summary="Start a command in the background.",
        body=messages.StartCommand,
        answer=messages.Command,
        status=201,
        has_key=True,
        problems=(422,),
    ),
    Route(
        method="GET",
        path="/v1/commands",
        action=Action.OPERATE,
        handle=list_commands,
        summary="List the commands that run, and those that have ended and are still kept.",
        answer=messages.Commands,
    ),
    Route(
        method="POST",
        path="/v1/commands/ended",
        action=Action.OPERATE,
        handle=take_ended,
        summary="Return the commands that have ended and were not reported before, each once.",
        body=messages.TakeEnded,
        answer=messages.Commands,
        has_key=True,
        problems=(422,),
        waits=True,
    ),
    Route(
        method="GET",
        path=ID,
        action=Action.OPERATE,
        handle=look,
        summary="Show a command; with `wait`, wait for its end.",
        query=WaitFor,
        answer=messages.Command,
        problems=(409,),
        waits=True,
    ),
    Route(
        method="GET",
        path=f"{ID}/output",
        action=Action.OPERATE,
        handle=read,
        summary="Read the output of a command from an offset.",
        query=messages.ReadOutput,
        answer=messages.OutputPiece,
        problems=(409, 422),
        waits=True,
    ),
    Route(
        method="GET",
        path=f"{ID}/watch",
        action=Action.OPERATE,
        handle=watch,
        summary="Wait until the output of a command matches a pattern.",
        query=messages.WatchOutput,
        answer=messages.Matched,
        problems=(409, 422),
        waits=True,
    ),
    Route(
        method="POST",
        path=f"{ID}/stdin",
        action=Action.OPERATE,
        handle=write,
        summary="Write to the stdin of a command, or close it.",
        body=messages.WriteStdin,
        answer=messages.Command,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path=f"{ID}/signal",
        action=Action.OPERATE,
        handle=send_signal,
        summary="Send a signal to a command.",
        body=messages.SendSignal,
        answer=messages.Command,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path=f"{ID}/resize",
        action=Action.OPERATE,
        handle=resize,
        summary="Resize the terminal of a command.",
        body=messages.Resize,
        answer=messages.Command,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path=f"{ID}/stop",
        action=Action.OPERATE,
        handle=stop,
        summary="Stop a command and all its processes; the response comes when all have ended.",
        body=messages.StopCommand,
        answer=messages.Command,
        problems=(409,),
    ),
)
