"""Parts of the terminal verbs: widths, keys, the line editor, questions, the session table, and shown events."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.cli.client.client import Client
from banksman.cli.client.discovery import named
from banksman.cli.output import PLAIN, as_line, cut, padded, rows, width, wrapped
from banksman.cli.tui import keyboard, session_table
from banksman.cli.tui.event_loop import ScreenLoop, Typed
from banksman.cli.tui.event_view import EventPrinter, prompt_of, tokens_of
from banksman.cli.tui.keyboard import HISTORY_MAX, LINE_CHARACTERS_MAX, Decoder, KeyPress, LineEditor, Pasted
from banksman.cli.tui.question_view import question_of
from banksman.cli.tui.screen import ScreenStatus, TextStyle, duration_in_words, seconds_in_words
from banksman.cli.tui.session_table import ORDER, SessionRow
from banksman.cli.tui.turn_view import Stops, TurnOptions, TurnWatch

LETTERS = st.text(st.sampled_from("ab é日本🙂e\u0301한 "), max_size=60)
COLUMNS = st.integers(1, 40)


# -- widths ----------------------------------------------------------------------------------------------------------
def test_width_counts_wide_and_combining_letters() -> None:
    assert [width(text) for text in ("abc", "日本", "🙂", "e\u0301", "한")] == [3, 4, 2, 1, 2]


@given(LETTERS, COLUMNS)
def test_cut_fits_the_columns_and_marks_the_cut(text: str, columns: int) -> None:
    short = cut(text, columns)
    assert width(short) <= columns
    assert short == text if width(text) <= columns else short.endswith("…")
    assert width(padded(short, columns)) == columns


@given(LETTERS, st.integers(2, 40))
def test_rows_keep_the_whole_text_and_fit(text: str, columns: int) -> None:
    found = list(rows(text, columns))
    assert "".join(found) == text
    assert all(width(row) <= columns for row in found)


@given(LETTERS, st.integers(4, 40))
def test_wrapped_text_fits_and_loses_no_letter(text: str, columns: int) -> None:
    found = wrapped(text, columns, indent="  ")
    assert all(width(row) <= columns for row in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_wrapped_text_keeps_words_and_units_whole() -> None:
    assert wrapped("one two three", 9) == ["one two", "three"]
    assert wrapped("it took 44 s", 11) == ["it took", "44 s"]
    assert wrapped("  indented", 40) == ["  indented"]
    assert wrapped("abcdefghij", 4, indent="  ") == ["abcd", "efgh", "ij"]


# -- keys ------------------------------------------------------------------------------------------------------------
TYPED = b"a\xc3\xa9\x1b[A\x1bOB\x7f\x03\x1b[200~x\x1b[Ay\n\x1b[201~\x1b[1;5C\x1b[99~\r\xe6\x97\xa5\x15"
KEYS = [
    "a",
    "é",
    KeyPress("up"),
    KeyPress("down"),
    KeyPress("backspace"),
    Pasted("x\x1b[Ay\n"),
    KeyPress("word-right"),
    KeyPress("enter"),
    "日",
]


@given(st.lists(st.integers(0, len(TYPED)), max_size=6))
def test_key_decoder_ignores_how_bytes_are_split(places: list[int]) -> None:
    decoder = Decoder()
    found: list[str] = []
    before = 0
    for place in [*sorted(places), len(TYPED)]:
        found += decoder.feed(TYPED[before:place])
        before = place
    expected = [*KEYS, KeyPress("erase-line")]
    assert found == expected
    assert [type(key) for key in found] == [type(key) for key in expected]


@given(st.binary(max_size=200), st.integers(1, 7))
def test_key_decoder_accepts_any_bytes(data: bytes, size: int) -> None:
    decoder = Decoder()
    for place in range(0, len(data), size):
        for key in decoder.feed(data[place : place + size]):
            assert isinstance(key, KeyPress | Pasted) or (len(key) == 1 and key >= " ")
    decoder.flush()


def test_key_decoder_yields_escape_when_nothing_follows() -> None:
    decoder = Decoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_waiting
    assert decoder.flush() == [KeyPress("escape")]
    assert decoder.feed(b"\x1b") + decoder.feed(b"[A") == [KeyPress("up")]


def test_key_decoder_bounds_a_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyboard, "PASTE_BYTES_MAX", 10)
    decoder = Decoder()
    found = decoder.feed(b"\x1b[200~" + b"x" * 50) + decoder.feed(b"x" * 50 + b"\x1b[201~a")
    assert found == [Pasted("x" * 10), "a"]


# -- the line --------------------------------------------------------------------------------------------------------
NAMES = ("left", "right", "home", "end", "backspace", "delete", "erase-line", "erase-right", "erase-word", "up", "down")
STROKES = st.one_of(
    st.sampled_from("ab 日é"),
    st.sampled_from([KeyPress(name) for name in (*NAMES, "newline", "enter", "word-left", "tab")]),
)


@given(st.lists(STROKES, max_size=80), COLUMNS)
def test_line_editor_row_fits_and_contains_the_cursor(strokes: list[str], columns: int) -> None:
    editor = LineEditor()
    for stroke in strokes:
        editor.take(stroke)
        assert 0 <= editor.cursor <= len(editor.text)
        row, cursor = editor.row(columns, "> ")
        assert width(row) <= max(columns, 2)
        assert cursor < max(columns, 2)


def typed(editor: LineEditor, *strokes: str) -> LineEditor:
    for stroke in strokes:
        for key in [stroke] if isinstance(stroke, KeyPress | Pasted) else stroke:
            editor.take(key)
    return editor


def test_line_editor_handles_the_usual_keys() -> None:
    assert typed(LineEditor(), "abc", KeyPress("left"), KeyPress("backspace"), "X").text == "aXc"
    assert typed(LineEditor(), "ab", KeyPress("home"), KeyPress("delete"), KeyPress("end"), "!").text == "b!"
    assert typed(LineEditor(), "one two  ", KeyPress("erase-word")).text == "one "
    assert typed(LineEditor(), "one two", KeyPress("word-left"), KeyPress("erase-right")).text == "one "
    assert typed(LineEditor(), "one two", KeyPress("word-left"), KeyPress("erase-line")).text == "two"
    # A letter with a combining mark is one letter.
    assert typed(LineEditor(), "ae\u0301", KeyPress("backspace")).text == "a"
    assert typed(LineEditor(), Pasted("a\r\nb\rc")).text == "a\nb\nc"


def test_line_editor_history_recalls_entered_lines() -> None:
    editor = typed(LineEditor(), "one", KeyPress("enter"), "two", KeyPress("enter"), "now")
    assert typed(editor, KeyPress("up")).text == "two"
    assert typed(editor, KeyPress("up"), KeyPress("up"), KeyPress("up")).text == "one"
    assert typed(editor, KeyPress("down"), KeyPress("down"), KeyPress("down")).text == "now"
    for number in range(HISTORY_MAX + 10):
        typed(editor, KeyPress("erase-line"), str(number), KeyPress("enter"))
    assert typed(editor, *[KeyPress("up")] * (HISTORY_MAX + 50)).text == "10"


def test_line_editor_bounds_its_line_and_puts_back_only_into_an_empty_one() -> None:
    editor = typed(LineEditor(), Pasted("x" * (LINE_CHARACTERS_MAX + 5)), "y")
    assert len(editor.text) == LINE_CHARACTERS_MAX
    editor.put_back("other")
    assert editor.text.startswith("xxx")
    editor.clear()
    editor.put_back("other")
    assert editor.text == "other"


# -- questions -------------------------------------------------------------------------------------------------------
def test_question_is_chosen_by_letter_or_number() -> None:
    asked = question_of({"question": "q-1", "wants": "permission", "tool": "Bash", "input": {"command": "ls"}}, "t")
    assert asked.line() == "Bash: ls — allow? [a]llow / [d]eny / [i]nterrupt"
    chosen = [asked.chosen(key) for key in ("a", "D", "1", "3")]
    assert [choice and choice.name for choice in chosen] == ["allow", "deny", "allow", "interrupt"]
    assert [asked.chosen(key) for key in ("x", "0", "4", KeyPress("enter"), Pasted("a b"), "²")] == [None] * 6


def test_question_offers_the_agents_options() -> None:
    options = [
        {"optionId": "once", "name": "Allow once", "kind": "allow_once"},
        {"optionId": "ever", "name": "Always", "kind": "allow_always"},
        {"optionId": "no", "name": "Reject", "kind": "reject_once"},
        {"name": "no id"},
        "none",
    ]
    asked = question_of(
        {"id": "q", "tool": "edit", "input": {}, "details": {"options": options, "title": "Edit x"}}, None
    )
    assert asked.subject == ("the agent says: Edit x",)
    assert asked.line() == "edit (1 line above) — allow? [A]llow once / [2] Always / [d] Reject / [i]nterrupt"
    assert [choice.body for key in "a2d" if (choice := asked.chosen(key))] == [
        {"decision": "once"},
        {"decision": "ever"},
        {"decision": "no"},
    ]


def test_question_with_a_form_cannot_be_accepted_by_key() -> None:
    asked = question_of({"question": "q", "wants": "elicitation", "details": {"message": "Which one?"}}, "t")
    assert "Which one?" in asked.line()
    assert asked.chosen("a") is None
    assert asked.chosen("d") is not None


# -- the table of sessions -------------------------------------------------------------------------------------------
def row(state: str, **more: Any) -> SessionRow:
    usual: dict[str, Any] = {"name": state, "agent": "claude", "at": 90.0, "created": 1.0, "cost": 0.5}
    every: dict[str, Any] = {"id": f"s-{state}", "state": state, "queue": 1, "questions": 1, **usual, **more}
    return SessionRow(**every)


def test_session_table_ranks_sessions_that_need_attention_first() -> None:
    assert [each.state for each in sorted(map(row, reversed(ORDER)), key=lambda each: each.rank)] == list(ORDER)
    assert row("a-new-one").rank > row("gone").rank


def test_session_table_tells_limit_and_retry_before_prompt() -> None:
    retry = {"attempt": 3, "attempts_max": 10, "seconds": 12.4, "error": "rate_limited", "status": 429, "cause": "x"}
    assert session_table.retry_in_words(retry) == "retry 3 of 10 in 12 s: rate limited (429)"
    bare = {**retry, "attempts_max": None, "seconds": 0.0, "status": None}
    assert session_table.retry_in_words(bare) == "retry 3: rate limited"
    at = time.strftime("%H:%M", time.localtime(3700))
    limited: dict[str, Any] = {"limited_until": 3700.0, "queue": [{}, {}, {}]}
    assert session_table.limit_in_words(limited, 100.0) == f"limited until {at}, 3 asks wait"
    assert session_table.limit_in_words({**limited, "queue": [{}]}, 100.0) == f"limited until {at}, 1 ask waits"
    assert session_table.limit_in_words({**limited, "queue": []}, 100.0) == f"limited until {at}"
    assert session_table.limit_in_words(limited, 3700.0) is None
    # A server of an older release does not send the field.
    assert session_table.limit_in_words({"queue": []}, 0.0) is None
    cells = session_table.cells(row("running", prompt="do it", limit="limited", retry="retry 3"), 100.0)
    assert cells["prompt"] == "limited · retry 3 · do it"
    assert session_table.cells(row("running", limit="limited"), 100.0)["prompt"] == "limited"


def test_session_table_drops_columns_in_the_documented_order() -> None:
    more = {"processes": 3, "memory_bytes": 5 << 20, "name": "日本" * 20, "host": "build-1"}
    one = row("running", prompt="do it " * 40, since=10.0, **more)
    shown: list[set[str]] = []
    for columns in range(160, 9, -1):
        head, line = session_table.lines([one], columns, 100.0, style=PLAIN, selected=None)
        assert width(head) == columns
        assert width(line) == columns
        heads = set(head.replace("…", " ").split())
        if not shown or heads != shown[-1]:
            shown.append(heads)
    gone = [before - after for before, after in itertools.pairwise(shown)]
    names = {"processes": "PIDS", "memory": "MEMORY", "prompt": "DOES"}
    expected = [names.get(name, name.upper()) for name in session_table.DROPPED]
    assert [word for each in gone for word in each if word in expected][: len(expected)] == expected


def test_top_shows_the_memory_of_the_control_group_if_it_measures_that() -> None:
    tree = [{"rss_bytes": 5}, {"rss_bytes": None}, {"rss_bytes": 7}]
    for group, memory_bytes in ((None, 12), ({"memory_bytes": None}, 12), ({"memory_bytes": 9}, 9)):
        why = {"tree": tree, "containment": {"cgroup": group}}
        assert session_table._memory_bytes(why) == memory_bytes  # pyright: ignore[reportPrivateUsage]
    # A server of an older release has no such field.
    assert session_table._memory_bytes({"tree": tree}) == 12  # pyright: ignore[reportPrivateUsage]


# -- shown events ----------------------------------------------------------------------------------------------------
class Noted:
    """A screen that only records."""

    is_roomy = is_watched = True

    def __init__(self) -> None:
        self.out = ""
        self.lines: list[str] = []

    def text(self, piece: str) -> None:
        self.out += piece

    def end_text(self) -> None:
        self.out += "" if not self.out or self.out.endswith("\n") else "\n"

    def line(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        self.lines.append(text)

    def block(self, lines: Sequence[str]) -> None:
        self.lines.extend(lines)

    def busy(self, what: str | None) -> None:
        pass

    def tick(self) -> None:
        pass


def chunk(text: str, kind: str = "agent_message_chunk", **more: Any) -> dict[str, Any]:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}, **more}


def update(*, at: float = 0.0, partial: Any = (), updates: Any = ()) -> dict[str, Any]:
    return {"kind": "update", "turn": "t", "at": at, "body": {"partial": list(partial), "updates": list(updates)}}


def told(agent: str, *events: dict[str, Any]) -> Noted:
    screen = Noted()
    teller = EventPrinter(screen, agent)
    for event in events:
        teller.tell(event)
    teller.end(9.0)
    return screen


def test_told_text_adds_from_the_whole_only_what_pieces_missed() -> None:
    pieces = [update(partial=[chunk(piece)]) for piece in ("he", "llo")]
    assert told("claude", *pieces).out == "hello\n"
    assert told("claude", *pieces, update(updates=[chunk("hello there", messageId="m")])).out == "hello there\n"
    assert told("claude", *pieces, update(updates=[chunk("other", messageId="m")])).out == "hello\nother\n"
    twice = [*pieces, update(updates=[chunk("hello", messageId="m")])] * 2
    assert told("claude", *twice).out == "hello\nhello\n"


def test_told_text_of_a_piecewise_agent_continues_across_tools() -> None:
    said = [update(updates=[chunk(piece)]) for piece in ("he", "llo")]
    tool = update(updates=[{"sessionUpdate": "tool_call", "toolCallId": "c", "title": "ls", "status": "completed"}])
    assert told("gemini", *said, tool, *said).out == "hello\nhello\n"
    named = [update(updates=[chunk(text, messageId=id)]) for text, id in (("a", 1), ("b", 1), ("c", 2))]
    assert told("gemini", *named).out == "ab\nc\n"


def test_told_tool_is_one_line() -> None:
    call = {"sessionUpdate": "tool_call", "toolCallId": "c", "title": "Bash: ls", "status": "in_progress"}
    begun = update(at=1.0, updates=[call])

    def ended(status: str) -> dict[str, Any]:
        done = {"sessionUpdate": "tool_call_update", "toolCallId": "c", "status": status}
        return update(at=2.5, updates=[done])

    assert told("claude", begun, ended("in_progress"), ended("completed")).lines == ["✓ Bash: ls, 1.5 s"]
    assert told("claude", begun, ended("failed")).lines == ["✗ Bash: ls, failed, 1.5 s"]
    assert told("claude", begun).lines == ["- Bash: ls, not finished, 8.0 s"]
    assert told("claude", ended("completed")).lines == []


def test_status_row_fits_any_width() -> None:
    status = ScreenStatus("Ctrl-C interrupts")
    status.busy("Bash: make test")
    assert "Ctrl-C interrupts" in status.row(80)
    for columns in range(80):
        assert width(status.row(columns)) <= columns


def test_words_for_times_and_tokens_are_readable() -> None:
    assert [seconds_in_words(each) for each in (0.4, 59, 61, 3661, 200_000)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 01 min",
        "2 d 7 h",
    ]
    assert duration_in_words(1.26) == "1.3 s"
    assert tokens_of({"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 2}) == "15 tokens in, 2 out"
    assert tokens_of({"inputTokens": 7, "outputTokens": 1}) == "7 tokens in, 1 out"
    assert tokens_of(None) == tokens_of({"x": 1}) == tokens_of([1]) == ""
    assert prompt_of([{"type": "text", "text": "look"}, {"type": "image", "data": "…"}, "none"]) == "look [image]"
    assert as_line(prompt_of("a\x1bb")) == "a\\x1bb"


# -- the loop --------------------------------------------------------------------------------------------------------
class Pipe(keyboard.Keyboard):
    """A keyboard on which a test types by writing to `typing`."""

    def __init__(self) -> None:
        self.fd, self.typing = os.pipe()

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass


def test_question_whose_answer_was_not_sent_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer really cannot be sent: no server listens there."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = named(f"http://127.0.0.1:{gone.getsockname()[1]}")
    client = Client(lambda: place)
    pipe = Pipe()
    with ScreenLoop() as loop:
        session = {"id": "s", "name": None, "agent": "claude"}
        watch = TurnWatch(loop, Stops(loop, client), client, session, TurnOptions(form="text"))
        watch._keyboard = pipe  # pyright: ignore[reportPrivateUsage]
        watch._questions = [question_of({"id": "q", "tool": "Bash"}, "t")]  # pyright: ignore[reportPrivateUsage]
        watch._put()  # pyright: ignore[reportPrivateUsage]
        watch._take(Typed("a"))  # pyright: ignore[reportPrivateUsage]
        (done,) = loop.things(10)
        watch._take(done)  # pyright: ignore[reportPrivateUsage]
        told = capsys.readouterr().err
        assert "cannot answer the question" in told
        assert told.count("Bash — allow?") == 2
        # The answer counts again, and one that was given meanwhile elsewhere does not.
        watch._take(Typed("a"))  # pyright: ignore[reportPrivateUsage]
        watch._answered({"question": "q", "answer": "allow", "by": "me"})  # pyright: ignore[reportPrivateUsage]
        (done,) = loop.things(10)
        watch._take(done)  # pyright: ignore[reportPrivateUsage]
        assert "allow?" not in capsys.readouterr().err
        loop.stop_listening()
    os.close(pipe.fd)
    os.close(pipe.typing)


def test_screen_loop_hears_keys_while_events_never_end() -> None:
    pipe = Pipe()
    with ScreenLoop() as loop:
        loop.listen(pipe)
        loop.follow(lambda: itertools.repeat({}))
        os.write(pipe.typing, b"q")
        seen: list[object] = []
        for _ in range(10):
            # The screen is slower than the events: there is always one to show.
            while not loop._posted:  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.001)
            seen += loop.things(None)
        assert any(isinstance(thing, Typed) for thing in seen)
    for thread in threading.enumerate():
        if thread.name == "banksman-follow":
            thread.join(10)
    os.close(pipe.fd)
    os.close(pipe.typing)
