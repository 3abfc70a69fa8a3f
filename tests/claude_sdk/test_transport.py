"""The SDK's transport on the process layer: conversation, limits, errors, and the end of every process."""

# The SDK declares that its context manager may swallow exceptions, which it never does.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    CLIConnectionError,
    CLIJSONDecodeError,
    CLINotFoundError,
    PermissionResultAllow,
    PermissionResultDeny,
    ProcessError,
    SystemMessage,
    TextBlock,
    ToolPermissionContext,
)
from tests.claude_sdk.cli import ask, scripted
from tests.process.helpers import alive, run_program, rungs, running_program, wait_none
from tests.thorough import one_in, thorough

from banksman import claude_sdk
from banksman.claude_sdk import ClaudeTransport
from banksman.claude_sdk.cli_output import TAIL_BYTES_MAX, WAITING_BYTES_MAX, MessageReader
from banksman.core.wire.framing import FRAME_BYTES_MAX

SECONDS_MAX = 60.0


def client_of(options: ClaudeAgentOptions) -> tuple[ClaudeSDKClient, ClaudeTransport]:
    transport = claude_sdk.transport(options)
    return ClaudeSDKClient(options, transport=transport), transport


def text_of(message: Any) -> str:
    assert isinstance(message, AssistantMessage)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return block.text


async def read_all(transport: ClaudeTransport) -> list[dict[str, Any]]:
    return [message async for message in transport.read_messages()]


# -- conversation ----------------------------------------------------------------------------------------------------
async def test_client_talks_and_finished_tells_how_cli_ended(tmp_path: Path, marker: str) -> None:
    client, transport = client_of(scripted(tmp_path, marker))
    async with client:
        for prompt in ("first", "second"):
            assert text_of((await ask(client, prompt))[0]) == prompt
        assert transport.finished is None
    assert alive(marker) == []
    assert transport.finished is not None
    assert (transport.finished.code, transport.finished.survivors) == (0, ())
    assert rungs(transport.finished)[0] == "eof"


async def test_command_line_and_environment_are_those_of_sdk(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDECODE", "1")
    code = """
for prompt in prompts():
    say(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))
    result()
"""

    async def allow(tool: str, given: dict[str, Any], context: ToolPermissionContext) -> PermissionResultAllow:
        return PermissionResultAllow()

    (tmp_path / "work").mkdir()
    client, _ = client_of(
        scripted(
            *(tmp_path, marker, code),
            model="some-model",
            can_use_tool=allow,
            extra_args={"new-flag": "x"},
            env={"GIVEN": "yes"},
            cwd=tmp_path / "work",
            user="root",
        )
    )
    async with client:
        argv, env, cwd = json.loads(text_of((await ask(client, "go"))[0]))
    words = " ".join(argv)
    for flags in ("--model some-model", "--permission-prompt-tool stdio", "--new-flag x", "--input-format stream-json"):
        assert flags in words
    assert (env["GIVEN"], env["CLAUDE_CODE_ENTRYPOINT"], cwd) == ("yes", "sdk-py", str(tmp_path / "work"))
    assert "CLAUDE_AGENT_SDK_VERSION" in env
    assert "CLAUDECODE" not in env


async def test_requests_of_cli_reach_callback_and_answers_reach_cli(tmp_path: Path, marker: str) -> None:
    code = """
waiting = prompts()
next(waiting)
ask("r1", subtype="can_use_tool", tool_name="Bash", input={"command": "ls"})
ask("r2", subtype="can_use_tool", tool_name="Rm", input={})
answers = {answer["response"]["request_id"]: answer["response"]["response"]["behavior"]
           for answer in (next(waiting), next(waiting))}
say(json.dumps(answers))
result()
next(waiting, None)
"""

    async def decide(
        tool: str, given: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow | PermissionResultDeny:
        return PermissionResultAllow() if tool == "Bash" else PermissionResultDeny()

    client, _ = client_of(scripted(tmp_path, marker, code, can_use_tool=decide))
    async with client:
        answers = json.loads(text_of((await ask(client, "go"))[0]))
    assert answers == {"r1": "allow", "r2": "deny"}


async def test_interrupt_and_set_model_are_answered(tmp_path: Path, marker: str) -> None:
    client, _ = client_of(scripted(tmp_path, marker))
    async with client:
        await client.set_model("other")
        await client.interrupt()
        assert text_of((await ask(client, "still here"))[0]) == "still here"


async def test_end_input_is_not_a_stop(tmp_path: Path, marker: str) -> None:
    """The CLI works on after the end of its input, and its output arrives."""
    code = "list(prompts()); say('after the end'); os.write(1, b'no newline')"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    await transport.end_input()
    (message,) = await read_all(transport)
    assert message["type"] == "assistant"
    assert transport.finished is not None
    assert (transport.finished.code, transport.finished.ladder) == (0, ())
    await transport.close()


# -- limits ----------------------------------------------------------------------------------------------------------
async def test_line_beyond_limit_of_sdk_passes(tmp_path: Path, marker: str) -> None:
    code = "\nfor prompt in prompts():\n    say('x' * (3 << 20))\n    result()\n"
    client, _ = client_of(scripted(tmp_path, marker, code))
    async with client:
        assert len(text_of((await ask(client, "go"))[0])) == 3 << 20


async def test_explicit_max_buffer_size_still_raises(tmp_path: Path, marker: str) -> None:
    code = "say('x' * 5000); signal.pause()"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code, max_buffer_size=1000))
    await transport.connect()
    with pytest.raises(CLIJSONDecodeError, match="maximum buffer size of 1000 bytes"):
        await read_all(transport)
    await transport.close()
    assert alive(marker) == []


def test_messages_before_refused_line_are_yielded() -> None:
    messages = MessageReader(100).feed(b'{"type":"user"}\n{"type":"user","text":"' + b"x" * 500 + b'"}\n')
    assert next(messages) == {"type": "user"}
    with pytest.raises(CLIJSONDecodeError, match="maximum buffer size of 100 bytes"):
        next(messages)


@pytest.mark.parametrize(("extra", "is_refused"), [(0, False), (1, True)])
@pytest.mark.parametrize("newline", ["\n", ""])
def test_max_buffer_size_counts_characters(extra: int, is_refused: bool, newline: str) -> None:
    empty = '{"type":"user","text":""}'
    line = empty.replace('""', '"' + "\U0001f600" * (100 - len(empty) + extra) + '"') + newline
    reader = MessageReader(100)
    messages: list[dict[str, Any]] = []
    try:
        for byte in line.encode():
            messages += reader.feed(bytes((byte,)))
        messages += reader.end()
    except CLIJSONDecodeError:
        assert is_refused
    else:
        assert not is_refused
        assert messages == [json.loads(line)]


def test_oversize_line_becomes_placeholder_and_file() -> None:
    reader = MessageReader(None)
    line = b'{"type":"user","text":"' + b"x" * FRAME_BYTES_MAX + b'"}\n'
    messages = [*reader.feed(line), *reader.feed(b'{"type":"result"}\n')]
    placeholder, after = messages
    assert (placeholder["type"], placeholder["subtype"]) == ("system", "banksman_oversize")
    assert placeholder["bytes"] == len(line) - 1
    assert Path(placeholder["file"]).read_bytes() == line[:-1]
    assert after == {"type": "result"}
    path = Path(placeholder["file"])
    del reader
    assert not path.exists()


def test_oversize_line_that_sdk_must_act_on_raises() -> None:
    reader = MessageReader(None)
    with pytest.raises(CLIJSONDecodeError, match="bytes is in /"):
        list(reader.feed(b'{"type":"result","result":"' + b"x" * FRAME_BYTES_MAX + b'"}\n'))


# -- errors ----------------------------------------------------------------------------------------------------------
async def test_process_error_has_exit_code_and_end_of_stderr(
    tmp_path: Path, marker: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"complain('begin\\n' + 'x\\n' * {TAIL_BYTES_MAX} + 'the reason\\n'); sys.exit(3)"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    with pytest.raises(ProcessError) as raised:
        await read_all(transport)
    assert raised.value.exit_code == 3
    assert raised.value.stderr is not None
    assert raised.value.stderr.endswith("the reason")
    assert TAIL_BYTES_MAX - 10 < len(raised.value.stderr) <= TAIL_BYTES_MAX
    with pytest.raises(CLIConnectionError):
        await transport.write("{}\n")
    await transport.close()
    # Without a callback, the SDK lets the CLI write to the stderr of the program.
    assert capfd.readouterr().err.startswith("begin\n")


async def test_stderr_without_callback_is_copied_byte_by_byte(
    tmp_path: Path, marker: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code = r"os.write(2, b'one  \n\n\xff\r\n' + '\u20ac'.encode() * 30000 + b' no newline '); sys.exit(3)"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    with pytest.raises(ProcessError) as raised:
        await read_all(transport)
    await transport.close()
    assert capfdbinary.readouterr().err == b"one  \n\n\xff\r\n" + "\u20ac".encode() * 30000 + b" no newline "
    assert raised.value.stderr is not None
    assert raised.value.stderr.endswith("\u20ac no newline ")
    assert TAIL_BYTES_MAX - 10 < len(raised.value.stderr.encode()) <= TAIL_BYTES_MAX


def test_stderr_that_nobody_reads_blocks_neither_messages_nor_close(tmp_path: Path, marker: str) -> None:
    """The stderr of the program is a full pipe. The CLI writes more than may wait, and then its message."""
    code = f"""
import os, sys
from pathlib import Path
import banksman.claude_sdk
from tests.claude_sdk.cli import scripted
read, write = os.pipe()
os.dup2(write, 2)
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 65536)
except BlockingIOError:
    os.set_blocking(2, True)
async def main():
    script = "complain('x' * {2 * WAITING_BYTES_MAX}); say('after'); list(prompts())"
    transport = banksman.claude_sdk.transport(scripted(Path(WORDS[0]), MARKER, script))
    await transport.connect()
    print((await anext(transport.read_messages()))["type"], flush=True)
    await transport.close()
    print("closed", flush=True)
asyncio.run(main())
"""
    done = run_program(code, marker, tmp_path)
    assert (done.stdout, done.returncode) == ("assistant\nclosed\n", 0)
    assert alive(marker) == []


async def test_transport_can_connect_again_and_raises_again(tmp_path: Path, marker: str) -> None:
    transport = claude_sdk.transport(scripted(tmp_path, marker, "say('one'); sys.exit(3)"))
    await transport.close()
    for _ in range(2):
        await transport.connect()
        with pytest.raises(ProcessError):
            await read_all(transport)
        await transport.close()


async def test_signal_of_cli_is_negative_exit_code(tmp_path: Path, marker: str) -> None:
    transport = claude_sdk.transport(scripted(tmp_path, marker, "os.kill(os.getpid(), 9)"))
    await transport.connect()
    with pytest.raises(ProcessError) as raised:
        await read_all(transport)
    assert raised.value.exit_code == -9
    await transport.close()


async def test_stderr_callback_gets_lines_and_its_failure_loses_none(tmp_path: Path, marker: str) -> None:
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        raise ValueError(line)

    code = "complain('one\\ntw'); complain('o\\nlast')"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code, stderr=note))
    await transport.connect()
    assert await read_all(transport) == []
    await transport.close()
    assert lines == ["one", "two", "last"]


async def test_missing_cli_and_missing_folder_raise_errors_of_sdk(tmp_path: Path, marker: str) -> None:
    with pytest.raises(CLINotFoundError):
        await claude_sdk.transport(ClaudeAgentOptions(cli_path=tmp_path / "none")).connect()
    with pytest.raises(CLIConnectionError, match="Working directory does not exist"):
        await claude_sdk.transport(scripted(tmp_path, marker, cwd=tmp_path / "none")).connect()
    (tmp_path / "file").write_text("")
    with pytest.raises(CLIConnectionError, match="not executable"):
        await claude_sdk.transport(ClaudeAgentOptions(cli_path=tmp_path / "file")).connect()


async def test_close_is_allowed_before_connect_and_twice(tmp_path: Path, marker: str) -> None:
    transport = claude_sdk.transport(scripted(tmp_path, marker))
    await transport.close()
    with pytest.raises(CLIConnectionError):
        await read_all(transport)
    await transport.connect()
    assert transport.is_ready()
    await asyncio.gather(transport.close(), transport.close())
    await transport.close()
    assert not transport.is_ready()
    with pytest.raises(CLIConnectionError):
        await transport.write("{}\n")


# -- the end of every process ----------------------------------------------------------------------------------------
async def test_close_begins_stop_before_its_first_await(tmp_path: Path, marker: str) -> None:
    transport = claude_sdk.transport(scripted(tmp_path, marker))
    await transport.connect()
    closing = transport.close()
    closing.send(None)
    closing.close()  # Nothing of this coroutine runs after its first await.
    await asyncio.to_thread(wait_none, marker)
    await transport.close()


async def test_cli_blocked_on_unread_stdout_ends_by_end_of_input(tmp_path: Path, marker: str) -> None:
    """Reading continues, so the CLI comes to read its stdin. No signal is needed."""
    code = "emit('system', subtype='x' * (2 << 20)); list(prompts()); sys.exit(0)"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    await transport.close()
    assert transport.finished is not None
    assert transport.finished.code == 0


async def test_tool_in_its_own_session_is_swept(tmp_path: Path, marker: str) -> None:
    code = """
if fork() == 0:
    os.setsid()
    say("tool is up")
    stay()
list(prompts())
"""
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    assert (await anext(transport.read_messages()))["type"] == "assistant"
    await transport.close()
    assert alive(marker) == []
    assert transport.finished is not None
    assert len(transport.finished.swept) == 1


async def test_reading_ends_when_exited_cli_leaves_process_with_its_stdout(tmp_path: Path, marker: str) -> None:
    code = "say('one')\nif fork() == 0:\n    stay()\nsys.exit(0)"
    transport = claude_sdk.transport(scripted(tmp_path, marker, code))
    await transport.connect()
    async with asyncio.timeout(SECONDS_MAX):
        assert len(await read_all(transport)) == 1
    await transport.close()
    assert alive(marker) == []


async def test_dropped_reader_stops_cli(tmp_path: Path, marker: str) -> None:
    """The SDK cancels its reader before it closes the transport. A cancellation between the two ends the CLI."""
    transport = claude_sdk.transport(scripted(tmp_path, marker, "say('one'); signal.pause()"))
    await transport.connect()
    reader = asyncio.create_task(read_all(transport))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    await asyncio.to_thread(wait_none, marker)
    await transport.close()


async def converse(options: ClaudeAgentOptions) -> None:
    client = ClaudeSDKClient(options)
    await client.connect()
    try:
        await ask(client, "hello")
    finally:
        await client.disconnect()


# The SDK leaves its queues open where a cancellation cuts its own cleanup short.
@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
@pytest.mark.parametrize("times", one_in(2, [1, 2]))
async def test_raw_cancel_at_any_loop_pass_leaves_nothing(
    tmp_path: Path, marker: str, times: int, installed: None
) -> None:
    """Cancel a conversation at every await, from before its first step to after its last."""
    options = scripted(tmp_path, marker)
    passes, running = 0, None
    while running is None or running.cancelled():
        running = asyncio.create_task(converse(options))
        for _ in range(passes):
            await asyncio.sleep(0)
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([running])
        await asyncio.to_thread(wait_none, marker)
        # Each pass of the start is another state. Later the steps grow, until one conversation completes.
        passes += 1 if passes < 12 else passes // 3
    await running
    gc.collect()


@thorough
def test_killed_program_leaves_nothing(tmp_path: Path, marker: str) -> None:
    code = """
from pathlib import Path
from claude_agent_sdk import ClaudeSDKClient
import banksman.claude_sdk
from tests.claude_sdk.cli import scripted
banksman.claude_sdk.install()
async def main():
    options = scripted(Path(WORDS[0]), MARKER, "if fork() == 0:\\n    os.setsid(); stay()\\nfor p in prompts(): pass")
    async with ClaudeSDKClient(options):
        print("up", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with running_program(code, marker, tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        program.kill()
        program.wait()
    wait_none(marker)


@thorough
def test_trio_client_talks_through_guard_and_leaves_nothing(tmp_path: Path, marker: str) -> None:
    code = """
from pathlib import Path
import trio
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, CLINotFoundError
import banksman.claude_sdk
from tests.claude_sdk.cli import ECHO, ask, scripted
banksman.claude_sdk.install()
async def main():
    tool = "if fork() == 0:\\n    os.setsid(); stay()\\n"
    async with ClaudeSDKClient(scripted(Path(WORDS[0]), MARKER, tool + ECHO)) as client:
        print((await ask(client, "hello"))[0].content[0].text)
    print(alive(MARKER))
    try:
        await ClaudeSDKClient(ClaudeAgentOptions(cli_path="/none")).connect()
    except CLINotFoundError:
        print("not found")
trio.run(main)
"""
    done = run_program(code, marker, tmp_path)
    assert (done.stdout, done.returncode) == ("hello\n[]\nnot found\n", 0), done.stderr
    assert alive(marker) == []


async def test_system_messages_of_cli_arrive(tmp_path: Path, marker: str) -> None:
    code = "\nfor prompt in prompts():\n    emit('system', subtype='note')\n    result()\n"
    client, _ = client_of(scripted(tmp_path, marker, code))
    async with client:
        message = (await ask(client, "go"))[0]
    assert isinstance(message, SystemMessage)
    assert message.subtype == "note"
