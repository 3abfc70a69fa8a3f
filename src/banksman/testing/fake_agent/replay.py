"""An agent that says again what one was recorded to say: `--replay FILE`, whatever else the command line has.

The file is a bundle (store/bundle.py), or a recording of the wire: one JSON object a line with `t`, `d` ("in", "out",
"err", "ev") and `v`. Frames are said in their order and at once. Before what the agent said *after* it was told
something, it waits until it is told the same: a prompt, a request of that subtype, an answer to that question. What
the host does rests on what it was told before, so whatever it did in the recording it will come to do again.

What is different this time is what the host makes up, the uuids of its prompts and the names of its requests: the
recorded ones are replaced by the ones that came. All else is said byte for byte.

    A request that was never made in the recording      is answered, with success and nothing else.
    An interrupt that was repeated until it was taken   is not waited for again, and its answer not said.
    A prompt more than were recorded                    ends the agent, with code 64.
    A process that died by itself                       does so again, with its code.
    One that was stopped, or lives                      waits for the end of its stdin, or for a signal.
    Several processes of one session                    are told apart by their first request, which numbers them.

Codex's and ACP's recordings are not played: their replies have other names. What the agent wrote to stderr is not in a
bundle, but for one thing: a conversation that could not be resumed is known by what it writes there, and it is written.
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

    # What is done: "hear", "say", "err", "exit", and with what.
    Step: TypeAlias = tuple[str, Any]

FLAG = "--replay"
LIFE_SECONDS_MAX = 120
READ_BYTES_MAX = 65536
LINE_BYTES_MAX = 64 * 1024 * 1024
EXIT_USAGE = 64
FORGOTTEN = b"No conversation found\n"

# Words of a recording's own for what is no death of the process's own.
_CLOSED = "stdin closed"
_EXITED = "exit "


def main(argv: Sequence[str]) -> NoReturn:
    """Play the file that `argv` names, to its end."""
    place = next(index for index, word in enumerate(argv) if word.partition("=")[0] == FLAG)
    _, equals, value = argv[place].partition("=")
    path = value if equals else "".join(argv[place + 1 : place + 2])
    # Its default action is the kernel's, so it ends us in whatever we are stuck.
    signal.alarm(LIFE_SECONDS_MAX)
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(143))
    signal.signal(signal.SIGHUP, lambda _number, _frame: os._exit(129))
    try:
        with open(path, "rb") as file:
            lives = read(file.read().split(b"\n"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _leave(f"cannot be played: {path}: {error!r}", EXIT_USAGE)
    Player(lives).play()


# ── What is in the file ──


def read(lines: Sequence[bytes]) -> list[list[Step]]:
    """What each process of the recording did, in their order. Raises ValueError if it is no recording."""
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
                if isinstance(body.get("code"), int) and not is_retired and _is_own_death(rest, turns):
                    lives[-1].append(("exit", body["code"]))
            case _:
                pass
    return lives


def _is_own_death(rest: Sequence[Frame], turns: set[str]) -> bool:
    """Whether a process ended by itself. What comes after tells: a turn that was open failed by it; if none was, the
    session was not closed and has not left, because then it was asked to end."""
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
                # How it was spaced is not known any more; this is how the agent most likely had it.
                life.append(("say", json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode()))
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


# ── How it is played ──


class Player:
    """One process. It waits in one place only, for the next line of its stdin."""

    def __init__(self, lives: list[list[Step]]) -> None:
        self.lives = lives
        self.life: list[Step] = []
        self.input = b""
        # What was heard and not waited for yet, with what it is.
        self.heard: list[tuple[str, Frame]] = []
        # Each uuid of a prompt that was recorded, with the one that came in its place; and each name of a request.
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
                    self._await(value, label, place, is_optional=label == "interrupt" and is_interrupted)
                    is_interrupted = label == "interrupt" or (is_interrupted and label != "user")
        while self._hear(()):
            pass
        os._exit(0)

    def _choose(self) -> list[Step]:
        """Which of the processes we are: that whose first request has the name of ours. Else the first."""
        if len(self.lives) == 1 or not self._hear(None):
            return self.lives[0]
        first = self.heard[0][1].get("request_id")
        for life in self.lives:
            told: list[Frame] = [value for verb, value in life if verb == "hear"]
            if first is not None and told and told[0].get("request_id") == first:
                return life
        return self.lives[0]

    # ── Hearing ──

    def _await(self, recorded: Frame, label: str, place: int, *, is_optional: bool) -> None:
        """Until we are told what the agent was told here."""
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
        """Read one frame; False if there will be no more. What is not among `awaited` is not kept; None: all is."""
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
            # Nobody was recorded to answer this. The host would wait for it, and for nothing else.
            answer = frames.answered(str(frame.get("request_id")), {})
            _write(1, json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    # ── Saying ──

    def _say(self, line: bytes) -> None:
        if b'"control_response"' in line:
            said = self._answer(line)
            if said is None:
                return
            line = said
        found = [uuid for uuid in self.uuids if uuid in line]
        if found:
            # All at once: one that came in the place of another may be the recorded one of a third.
            pattern = b"|".join(map(re.escape, found))
            line = re.sub(pattern, lambda match: self.uuids[match[0]], line)
        _write(1, line + b"\n")

    def _answer(self, line: bytes) -> bytes | None:
        """An answer to what was asked this time; None if it was not asked."""
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
    """What a frame from the host is, as far as it must be the same again."""
    match frame:
        case {"type": "control_request", "request": {"subtype": str(subtype)}}:
            return subtype
        case {"type": "control_response", "response": {"request_id": str(request)}}:
            # The question is ours, and has the name that it had.
            return f"control_response {request}"
        case _:
            return str(frame.get("type"))


def _write(fd: int, data: bytes) -> None:
    """All of it. A reader that went away is no reason to end: Claude does not mind either."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def _leave(why: str, code: int) -> NoReturn:
    _write(2, f"fake_agent: {why}\n".encode(errors="replace"))
    os._exit(code)
