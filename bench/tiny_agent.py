"""Cheap agent for the benchmarks. It speaks the part of the Claude dialect that they need.

    python -I -S tiny_agent.py [FILE]

The prompt selects the turn:

- `frames N`: N stream events of about 400 bytes, then the result.
- `says N`: N messages of about 400 bytes, then the result.
- `ticks N RATE`: the same, RATE messages per second, each with the time of its write.
- `hang`: the init frame, then nothing until an interrupt.
- Any other prompt: the result.

The agent appends times to FILE: `prompt` and `interrupt` when it has read one, `boundary` when it
has written one. It ends without a traceback when its reader has closed the pipe.
"""

import os
import sys
import time

FRAME = (
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"%b"}},'
    b'"session_id":"11111111-1111-4111-8111-111111111111","parent_tool_use_id":null,'
    b'"uuid":"2b7fdfd1-3fa2-4498-b997-76f2eb1ef1c0"}\n' % (b"x" * 180)
)
SAYS = (
    b'{"type":"assistant","message":{"id":"msg_01","role":"assistant","model":"m",'
    b'"content":[{"type":"text","text":"tick=%%020d %b"}]},'
    b'"session_id":"11111111-1111-4111-8111-111111111111","parent_tool_use_id":null,'
    b'"uuid":"2b7fdfd1-3fa2-4498-b997-76f2eb1ef1c0"}\n' % (b"x" * 130)
)
BATCH = 500
# A unique conversation id: two sessions must not share a conversation.
RESULT = (
    b'{"type":"result","subtype":"%%s","is_error":%%s,"terminal_reason":"%%s",'
    b'"duration_ms":1,"duration_api_ms":1,"num_turns":1,"session_id":"s%d","result":"ok",'
    b'"user_message_uuids":["%%s"]}\n' % os.getpid()
)
LIFECYCLE = b'{"type":"command_lifecycle","command_uuid":"%s","state":"%s"}\n'
INIT = (
    b'{"type":"system","subtype":"init","session_id":"s%d","user_message_uuids":["%%s"]}\n'
    % os.getpid()
)
ACK = (
    b'{"type":"control_response","response":{"subtype":"success","request_id":"%s",'
    b'"response":{"still_queued":[]}}}\n'
)


def field(line: bytes, name: bytes) -> bytes:
    """Return the text of a member at any depth. It suffices for the frames of the host."""
    _, _, rest = line.partition(b'"' + name + b'":')
    return rest.lstrip(b' "').partition(b'"')[0]


def main() -> None:
    times = (
        os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        if len(sys.argv) > 1 and sys.argv[1][0] == "/"
        else -1
    )

    def note(what: str) -> None:
        if times >= 0:
            os.write(times, f"{what} {time.monotonic()}\n".encode())

    def say(data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    current = b""
    for line in sys.stdin.buffer:
        if field(line, b"subtype") == b"interrupt":
            note("interrupt")
            say(ACK % field(line, b"request_id"))
            if current:
                uuid, current = current, b""
                say(RESULT % (b"error_during_execution", b"true", b"aborted_streaming", uuid))
                say(LIFECYCLE % (uuid, b"cancelled"))
                note("boundary")
        elif b'"control_request"' in line:
            say(ACK % field(line, b"request_id"))
        else:
            note("prompt")
            current = field(line, b"uuid") or b"none"
            say(
                LIFECYCLE % (current, b"queued")
                + LIFECYCLE % (current, b"started")
                + INIT % current
            )
            content = field(line, b"content")
            if content.startswith(b"frames "):
                for _ in range(int(content[7:]) // BATCH):
                    say(FRAME * BATCH)
            elif content.startswith(b"says "):
                for _ in range(int(content[5:]) // BATCH):
                    say(SAYS.replace(b"tick", b"said") % 0 * BATCH)
            elif content.startswith(b"ticks "):
                count, rate = map(int, content[6:].split())
                began = time.monotonic()
                for n in range(count):
                    time.sleep(max(0.0, began + n / rate - time.monotonic()))
                    say(SAYS % time.monotonic_ns())
            if content != b"hang":
                say(
                    RESULT % (b"success", b"false", b"completed", current)
                    + LIFECYCLE % (current, b"completed")
                )
                note("boundary")
                current = b""


# Not `contextlib.suppress`, whose import takes longer than the rest of the start.
try:
    main()
except BrokenPipeError:
    pass
