"""An agent that costs next to nothing: the Claude dialect, and what each benchmark needs of it.

Run by its path with `python -I -S`. A prompt is `frames N`: so many stream events of about 400 bytes, then the result;
`says N`: so many messages of about 400 bytes; `ticks N RATE`: the same, so many a second, each with the time in it;
`hang`: says that it began, and waits for an interrupt; anything else: the result at once. Times are written to the
file named by the first argument, if there is one: `boundary` when one left, `prompt` and `interrupt` when one came in.
"""

import os
import sys
import time

FRAME = (
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"'
    + b"x" * 180
    + b'"}},"session_id":"11111111-1111-4111-8111-111111111111","parent_tool_use_id":null,'
    b'"uuid":"2b7fdfd1-3fa2-4498-b997-76f2eb1ef1c0"}\n'
)
SAYS = (
    b'{"type":"assistant","message":{"id":"msg_01","role":"assistant","content":[{"type":"text","text":"tick=%020d '
    + b"x" * 130
    + b'"}]},"session_id":"11111111-1111-4111-8111-111111111111","parent_tool_use_id":null,'
    b'"uuid":"2b7fdfd1-3fa2-4498-b997-76f2eb1ef1c0"}\n'
)
BATCH = 500
RESULT = (
    b'{"type":"result","subtype":"%s","is_error":%s,"terminal_reason":"%s","duration_ms":1,"duration_api_ms":1,'
    b'"num_turns":1,"session_id":"s","result":"ok","user_message_uuids":["%s"]}\n'
)
LIFECYCLE = b'{"type":"command_lifecycle","command_uuid":"%s","state":"%s"}\n'
# Each has a conversation of its own: two sessions may not have the same.
INIT = (
    b'{"type":"system","subtype":"init","session_id":"s%d","user_message_uuids":["%%s"]}\n'
    % os.getpid()
)
ACK = b'{"type":"control_response","response":{"subtype":"success","request_id":"%s","response":{"still_queued":[]}}}\n'


def field(line: bytes, name: bytes) -> bytes:
    """The text of a member, wherever it is. Enough for frames that we know."""
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


main()
