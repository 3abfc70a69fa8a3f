"""Agent that replays a recording: `--replay FILE`, whatever other arguments it has.

The file is a bundle (store/bundle.py) or a recording of the wire. A recording of the wire has one
JSON object a line with `t`, `d` ("in", "out", "err", "ev") and `v`. The agent writes the recorded
frames in their order, without delays. Where the recorded agent had read a frame, the replay waits
for an equal frame: a prompt, a request of that subtype, or an answer to that question. The actions
of the host depend only on the frames it received before. The host therefore repeats every action of
the recording.

The host generates new uuids for its prompts and new ids for its requests. The replay replaces the
recorded ones with the ones that arrived. It writes all other bytes unchanged.

    A request that is not in the recording              is answered with an empty success.
    An interrupt repeated until the agent took it       is not awaited again, nor answered.
    More prompts than the recording has                 end the agent with code 64.
    A process that died without being stopped           dies again, with its code.
    A process that was stopped, or still lives          waits for the end of stdin, or for a signal.
    Several processes of one session                    are told apart by their first request id.

Recordings of Codex and ACP are not supported, because their replies have other names. A bundle does
not contain stderr, so its replay writes nothing there, with one exception. The host recognises a
failed resume by a message on stderr. The replay writes that message where the bundle records a lost
context.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal

from banksman.testing.fake_agent import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn, TypeAlias

    from banksman.testing.fake_agent.frames import Frame

    # An action ("hear", "say", "err" or "exit") and its value.
    Step: TypeAlias = tuple[str, Any]

FLAG = "--replay"
LIFE_SECONDS_MAX = 120
READ_BYTES_MAX = 65536
LINE_BYTES_MAX = 64 * 1024 * 1024
EXIT_USAGE = 64
FORGOTTEN = b"No conversation found\n"

# Events of a recording that tell a stopped process from a process that died.
_CLOSED = "stdin closed"
_EXITED = "exit "


def main(argv: Sequence[str]) -> NoReturn:
    """Replay the file that `argv` names, to its end."""
    place = next(index for index, word in enumerate(argv) if word.partition("=")[0] == FLAG)
    _, equals, value = argv[place].partition("=")
    path = value if equals else "".join(argv[place + 1 : place + 2])
    # SIGALRM keeps its default action, which the kernel performs. It ends the process even if the
    # process is blocked.
    signal.alarm(LIFE_SECONDS_MAX)
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(143))
    signal.signal(signal.SIGHUP, lambda _number, _frame: os._exit(129))
    try:
        with open(path, "rb") as file:
            lives = read(file.read().split(b"\n"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _leave(f"cannot be played: {path}: {error!r}", EXIT_USAGE)
    Player(lives).play()


# ── Parsing the file ──


def read(lines: Sequence[bytes]) -> list[list[Step]]:
    """Return the steps of each recorded process, in order. Raises ValueError for any other file."""
    values: list[Any] = [json.loads(line) for line in lines if line.strip()]
    if not values or not all(isinstance(value, dict) for value in values):
        raise ValueError("a JSON object a line is wanted")
    if values[0].get("banksman") == "bundle":
        lives = _lives_of_bundle(values[1:])
    elif "d" in values[0]:
        lives = [_life_of_recording(values)]
    else:
        raise ValueError("neither a bundle nor a recording")
    lives = [life for life in lives if life]
    if not lives:
        raise ValueError("nothing was said in it")
    return lives


def _lives_of_bundle(values: Sequence[Frame]) -> list[list[Step]]:
    lives: list[list[Step]] = [[]]
    is_retired = False
    turns: set[str] = set()
    for place, value in enumerate(values):
        match value["kind"]:
            case "update":
                lives[-1].append(("say", _frame_of(value)))
            case "sent":
                lives[-1].append(("hear", json.loads(_frame_of(value))))
            case "process.started":
                lives.append([])
                is_retired = False
            case "process.retired":
                is_retired = True
            case "turn.started":
                turns.add(value["turn"])
            case "turn.ended":
                turns.discard(value["turn"])
            case "process.exited":
                rest = list(_until_next_process(values[place + 1 :]))
                if any(later["kind"] == "session.context_lost" for later in rest):
                    lives[-1].append(("err", FORGOTTEN))
                body: Frame = value.get("body") or {}
                if (
                    isinstance(body.get("code"), int)
                    and not is_retired
                    and _is_own_death(rest, turns)
                ):
                    lives[-1].append(("exit", body["code"]))
            case _:
                pass
    return lives


def _is_own_death(rest: Sequence[Frame], turns: set[str]) -> bool:
    """Tell whether a process died without being asked to end.

    The later events decide:

    - If a turn was open, the exit of the process made the turn fail.
    - If no turn was open, the session was neither closed nor left. The host asks the process to end
      in both of these cases.
    """
    if not turns:
        return all(later["kind"] not in ("session.closed", "session.left") for later in rest)
    ends: list[Frame] = [later.get("body") or {} for later in rest if later["kind"] == "turn.ended"]
    return any(end.get("outcome") == "failed" and end.get("by") == "exit" for end in ends)


def _until_next_process(values: Sequence[Frame]) -> Iterator[Frame]:
    for value in values:
        if value["kind"] == "process.started":
            return
        yield value


def _life_of_recording(values: Sequence[Frame]) -> list[Step]:
    life: list[Step] = []
    is_stopped = False
    for value in values:
        match value["d"], value["v"]:
            case "in", frame:
                life.append(("hear", frame))
            case "out", frame:
                # The recording does not keep the original spacing. The agent most likely used this
                # one.
                life.append(
                    ("say", json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode())
                )
            case "err", str(text):
                life.append(("err", text.encode()))
            case "ev", str(text) if text == _CLOSED or text.startswith("signal "):
                is_stopped = True
            case "ev", str(text) if text.startswith(_EXITED) and not is_stopped:
                life.append(("exit", int(text.removeprefix(_EXITED))))
            case _:
                pass
    return life


def _frame_of(value: Frame) -> bytes:
    return base64.b64decode(value["frame64"]) if "frame64" in value else value["frame"].encode()


# ── Playing the steps ──


class Player:
    """Player of one process. It waits in one place only: for the next line of stdin."""

    def __init__(self, lives: list[list[Step]]) -> None:
        self.lives = lives
        self.life: list[Step] = []
        self.input = b""
        # Frames that were read before the player waited for them, with their labels.
        self.heard: list[tuple[str, Frame]] = []
        # Recorded prompt uuids mapped to the uuids that arrived instead; likewise the request ids.
        self.uuids: dict[bytes, bytes] = {}
        self.requests: dict[str, str] = {}
        self.unasked: set[str] = set()

    def play(self) -> NoReturn:
        self.life = self._choose()
        is_interrupted = False
        for place, (verb, value) in enumerate(self.life):
            match verb:
                case "say":
                    self._say(value)
                case "err":
                    _write(2, value)
                case "exit":
                    os._exit(value)
                case _:
                    label = label_of(value)
                    self._await(
                        value, label, place, is_optional=label == "interrupt" and is_interrupted
                    )
                    is_interrupted = label == "interrupt" or (is_interrupted and label != "user")
        while self._hear(()):
            pass
        os._exit(0)

    def _choose(self) -> list[Step]:
        """Choose the recorded process that this process replays.

        It is the one whose first request has the id of the first request read here, else the first.
        """
        if len(self.lives) == 1 or not self._hear(None):
            return self.lives[0]
        first = self.heard[0][1].get("request_id")
        for life in self.lives:
            told: list[Frame] = [value for verb, value in life if verb == "hear"]
            if first is not None and told and told[0].get("request_id") == first:
                return life
        return self.lives[0]

    # ── Input ──

    def _await(self, recorded: Frame, label: str, place: int, *, is_optional: bool) -> None:
        """Wait for the frame that the recorded agent read at this place."""
        came = self._take(label)
        if came is None and is_optional:
            self.unasked.add(str(recorded.get("request_id")))
            return
        while came is None:
            awaited = [label_of(value) for verb, value in self.life[place:] if verb == "hear"]
            if not self._hear(awaited):
                os._exit(0)
            came = self._take(label)
        match recorded.get("uuid"), came.get("uuid"):
            case str(theirs), str(ours):
                self.uuids[json.dumps(theirs).encode()] = json.dumps(ours).encode()
            case _:
                pass
        if recorded.get("type") == "control_request":
            self.requests[str(recorded.get("request_id"))] = str(came.get("request_id"))

    def _take(self, label: str) -> Frame | None:
        for place, (heard, frame) in enumerate(self.heard):
            if heard == label:
                del self.heard[place]
                return frame
        return None

    def _hear(self, awaited: Sequence[str] | None) -> bool:
        """Read one frame; return False at the end of stdin.

        `awaited`: labels of the frames to keep; None keeps every frame.
        """
        while b"\n" not in self.input:
            data = os.read(0, READ_BYTES_MAX)
            if not data:
                return False
            self.input += data
            assert len(self.input) <= LINE_BYTES_MAX
        line, _, self.input = self.input.partition(b"\n")
        if not line.strip():
            return True
        try:
            frame: Any = json.loads(line)
        except ValueError:
            _leave(f"this is no frame: {line[:100]!r}", 1)
        if isinstance(frame, dict):
            self._keep(frame, awaited)  # pyright: ignore[reportUnknownArgumentType]
        return True

    def _keep(self, frame: Frame, awaited: Sequence[str] | None) -> None:
        label = label_of(frame)
        if awaited is None or label in awaited:
            self.heard.append((label, frame))
        elif label == "user":
            _leave("the recording has no more prompts", EXIT_USAGE)
        elif frame.get("type") == "control_request":
            # The recording has no answer to this request, and the host would wait for one forever.
            answer = frames.answered(str(frame.get("request_id")), {})
            _write(1, json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    # ── Output ──

    def _say(self, line: bytes) -> None:
        if b'"control_response"' in line:
            said = self._answer(line)
            if said is None:
                return
            line = said
        found = [uuid for uuid in self.uuids if uuid in line]
        if found:
            # One pass for all uuids: the new uuid of one prompt may equal the recorded uuid of
            # another.
            pattern = b"|".join(map(re.escape, found))
            line = re.sub(pattern, lambda match: self.uuids[match[0]], line)
        _write(1, line + b"\n")

    def _answer(self, line: bytes) -> bytes | None:
        """Rewrite a recorded answer for the request of this run; None if there was no request."""
        try:
            frame: Frame = json.loads(line)
        except ValueError:
            return line
        response: Any = frame.get("response")
        if frame.get("type") != "control_response" or not isinstance(response, dict):
            return line
        recorded: str = str(response.get("request_id"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if recorded in self.unasked:
            return None
        asked = self.requests.get(recorded, recorded)
        if asked == recorded:
            return line
        response["request_id"] = asked
        return json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def label_of(frame: Frame) -> str:
    """Return the part of a host frame that must be the same in recording and replay."""
    match frame:
        case {"type": "control_request", "request": {"subtype": str(subtype)}}:
            return subtype
        case {"type": "control_response", "response": {"request_id": str(request)}}:
            # This agent asked the question, so the question has the recorded id.
            return f"control_response {request}"
        case _:
            return str(frame.get("type"))


def _write(fd: int, data: bytes) -> None:
    """Write all of `data`.

    A broken pipe does not end the process: Claude also continues when its reader is gone.
    """
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def _leave(why: str, code: int) -> NoReturn:
    _write(2, f"fake_agent: {why}\n".encode(errors="replace"))
    os._exit(code)
