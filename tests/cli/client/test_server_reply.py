"""An unexpected reply is one line of words, and never a traceback."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Generator

import pytest

from banksman.cli import REFUSED, main
from banksman.cli.client.server_reply import ServerReply, UnexpectedReply, checked, decode

VERBS = [
    ["ps"],
    ["ps", "--json"],
    ["why", "s"],
    ["why", "--stacks"],
    ["log", "s"],
    ["log", "s", "--follow"],
    ["open", "claude"],
    ["ask", "s", "hello"],
    ["run", "claude", "hello"],
    ["attach", "s"],
    ["answer", "s", "allow"],
    ["answer", "s", "q", "allow"],
    ["interrupt", "s"],
    ["edit", "s", "t", "better"],
    ["close", "s"],
    ["hosts"],
    ["drain"],
]
REPLIES = [b"{}", b"[]", b"null", b"17", b'{"id": 1, "sessions": 2, "questions": {}, "events": "x"}']


class _Handler(http.server.BaseHTTPRequestHandler):
    reply = b""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.reply)))
        self.end_headers()
        self.wfile.write(self.reply)

    do_GET = do_POST = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  The base class names it so.
        pass


@contextlib.contextmanager
def answering(reply: bytes) -> Generator[str]:
    """Serve one reply to every request; yield the URL."""
    handler = type("Handler", (_Handler,), {"reply": reply})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("reply", REPLIES, ids=[each.decode()[:20] for each in REPLIES])
def test_unexpected_reply_is_reported_in_words_by_every_verb(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(reply) as url:
        for words in VERBS:
            # A verb that shows nothing of the reply does not complain.
            code = main([*words, "--url", url])
            told = capsys.readouterr().err
            assert "Traceback" not in told
            if code != 0:
                assert "cannot read the server's reply" in told, (words, told)
                assert code == REFUSED, words


def test_unexpected_reply_names_a_missing_member_at_any_depth() -> None:
    reply = checked(decode('{"outcome": {"kind": "done"}}'))
    with pytest.raises(UnexpectedReply, match="it has no 'text'"):
        reply["outcome"]["text"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "a list, not an object"),
        ('{"seq": "x"}', "'seq' is a string"),
        ('{"sessions": 3}', "'sessions' contains a number"),
        ('{"events": [null]}', "'events' contains null"),
        ('{"sessions": [{"queue": null}]}', "'queue' is null"),
    ],
)
def test_unexpected_reply_names_a_member_of_another_type(text: str, said: str) -> None:
    with pytest.raises(UnexpectedReply, match=said):
        checked(decode(text))


def test_reply_check_ignores_json_of_an_agent() -> None:
    event = {"kind": "question.asked", "body": {"input": {"id": 5, "events": "x", "seq": None}}}
    assert checked(decode(json.dumps({"events": [event]}))) == {"events": [event]}
    assert isinstance(decode("{}"), ServerReply)
