"""Parser of server-sent events: the rules of the standard, for every split of the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thorough import sample

from banksman.cli.client.event_stream import RETRY_MILLISECONDS_MAX, OversizeMessage, SseMessage, SseParser

# Each case: the bytes, the parsed messages, and the id to resume from.
CORPUS: list[tuple[str, bytes, list[SseMessage], str]] = [
    ("lf", b"data: a\n\n", [SseMessage("", "a", "")], ""),
    ("cr", b"data: a\r\rdata: b\r\r", [SseMessage("", "a", ""), SseMessage("", "b", "")], ""),
    ("crlf", b"data: a\r\n\r\ndata: b\r\n\r\n", [SseMessage("", "a", ""), SseMessage("", "b", "")], ""),
    ("mixed", b"id: 1\rdata: a\r\ndata: b\n\r\n", [SseMessage("", "a\nb", "1")], "1"),
    ("lf then cr", b"data: a\n\rdata: b\n\r", [SseMessage("", "a", ""), SseMessage("", "b", "")], ""),
    ("mark", b"\xef\xbb\xbfdata: a\n\n", [SseMessage("", "a", "")], ""),
    ("one mark only", b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [SseMessage("", "b", "")], ""),
    ("half a mark", b"\xef\xbbdata: a\n\ndata: b\n\n", [SseMessage("", "b", "")], ""),
    ("comments", b": hi\n:\ndata: a\n: there\n\n", [SseMessage("", "a", "")], ""),
    ("lines", b"data: a\ndata:\ndata: b\n\n", [SseMessage("", "a\n\nb", "")], ""),
    ("one space", b"data:  a\ndata:b\ndata: \n\n", [SseMessage("", " a\nb\n", "")], ""),
    ("empty data", b"data\n\ndata:\n\n", [SseMessage("", "", ""), SseMessage("", "", "")], ""),
    ("no data", b"event: x\nid: 7\n\ndata: a\n\n", [SseMessage("", "a", "7")], "7"),
    ("kind", b"event: x\nevent: y\ndata: a\n\ndata: b\n\n", [SseMessage("y", "a", ""), SseMessage("", "b", "")], ""),
    ("id stays", b"id: 1\ndata: a\n\ndata: b\n\n", [SseMessage("", "a", "1"), SseMessage("", "b", "1")], "1"),
    ("id is reset", b"id: 1\ndata: a\n\nid\ndata: b\n\n", [SseMessage("", "a", "1"), SseMessage("", "b", "")], ""),
    ("id with nul", b"id: 1\n\nid: 2\x003\ndata: a\n\n", [SseMessage("", "a", "1")], "1"),
    ("id with colons", b"id: a:b: c\ndata: x:y\n\n", [SseMessage("", "x:y", "a:b: c")], "a:b: c"),
    ("unknown field", b"what: x\n data: y\nDATA: z\ndata: a\n\n", [SseMessage("", "a", "")], ""),
    ("not ended", b"id: 1\ndata: a\n\nid: 2\ndata: b\n", [SseMessage("", "a", "1")], "1"),
    ("cut in a line", b"id: 1\ndata: a\n\nid: 2\ndata: b", [SseMessage("", "a", "1")], "1"),
    ("empty lines", b"\n\r\n\r\rdata: a\n\n\n\n", [SseMessage("", "a", "")], ""),
    (
        "other ends of lines",
        "data: a\u2028b\u0085c\x0bd\x0ce\n\n".encode(),
        [SseMessage("", "a\u2028b\x85c\x0bd\x0ce", "")],
        "",
    ),
    ("wide", "data: ñ…🙂\n\n".encode(), [SseMessage("", "ñ…🙂", "")], ""),
    ("not utf-8", b"data: a\xffb\n\n", [SseMessage("", "a\ufffdb", "")], ""),
    ("nothing", b"", [], ""),
]


@pytest.mark.parametrize(("sent", "heard", "id"), [case[1:] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_sse_parser_ignores_how_the_corpus_is_split(sent: bytes, heard: list[SseMessage], id: str) -> None:
    # Whole, in every two and in every three parts, and byte by byte.
    splits = [[sent]] + [
        [sent[:first], sent[first:second], sent[second:]]
        for first in range(len(sent) + 1)
        for second in range(first, len(sent) + 1)
    ]
    splits.append([sent[at : at + 1] for at in range(len(sent))])
    for parts in splits:
        parser = SseParser()
        assert [message for part in parts for message in parser.feed(part)] == heard, parts
        assert parser.id == id


def test_sse_parser_yields_a_message_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    # A CR alone ends a line: the parser does not wait for an LF.
    assert parser.feed(b"\r") == [SseMessage("", "a", "")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: b\n\n") == [SseMessage("", "b", "")]


@pytest.mark.parametrize(
    ("line", "retry"),
    [
        (b"retry: 1000", 1000),
        (b"retry:0", 0),
        (b"retry", None),
        (b"retry:", None),
        (b"retry: 1.5", None),
        (b"retry: -1", None),
        (b"retry:  1", None),
        (b"retry: 1 ", None),
        ("retry: \u0661".encode(), None),
        (b"retry: " + b"9" * 5000, RETRY_MILLISECONDS_MAX),
        (b"retry: 99999999", RETRY_MILLISECONDS_MAX),
    ],
)
def test_sse_parser_accepts_only_digits_as_retry(line: bytes, retry: int | None) -> None:
    parser = SseParser()
    # It applies without a message, and before the empty line.
    assert parser.feed(line + b"\n") == []
    assert parser.retry == retry


@pytest.mark.parametrize("sent", [b"data: ", b": ", b"data:x\n", b"data\n", b"x"])
def test_sse_parser_refuses_an_endless_message(sent: bytes) -> None:
    parser = SseParser(message_bytes_max=1000)
    with pytest.raises(OversizeMessage):
        list(map(parser.feed, itertools.repeat(sent, 2000)))


def test_sse_parser_accepts_a_message_of_exactly_the_limit() -> None:
    parser = SseParser(message_bytes_max=100)
    whole = b"data:" + b"x" * 95
    assert parser.feed(whole + b"\n\n") == [SseMessage("", "x" * 95, "")]
    with pytest.raises(OversizeMessage):
        parser.feed(whole + b"x\n\n")


def test_sse_parser_does_not_count_comments_between_messages() -> None:
    parser = SseParser(message_bytes_max=100)
    for _ in range(100):
        assert parser.feed(b": still here\n") == []


PIECES = [b"data: a", b"data", b"id: 1", b"id: \x00", b"event: e", b":", b"retry: 5", b"\r", b"\n", b"\r\n", b"\n\n"]


@settings(max_examples=sample(400), deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4)), max_size=30), st.data())
def test_sse_parser_ignores_how_any_bytes_are_split(pieces: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(pieces)
    whole = SseParser()
    heard = whole.feed(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=10)))
    parser = SseParser()
    parts = [sent[first:second] for first, second in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert [message for part in parts for message in parser.feed(part)] == heard
    assert (parser.id, parser.retry) == (whole.id, whole.retry)


TEXT = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=sample(200), deadline=None)
@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=4), TEXT)), st.sampled_from(["\n", "\r", "\r\n"]))
def test_sse_parser_reads_what_follows_the_standard(said: list[tuple[str, list[str], str]], end: str) -> None:
    lines: list[str] = []
    for event, data, id in said:
        lines += [f"event: {event}", *(f"data: {line}" for line in data), f"id: {id}", ""]
    sent = "".join(line + end for line in lines).encode()
    assert SseParser().feed(sent) == [SseMessage(event, "\n".join(data), id) for event, data, id in said]
