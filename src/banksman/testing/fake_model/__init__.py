"""A model API on loopback, scripted from the prompt, so that the real Claude Code runs offline and without a key.

    with FakeModel() as model:
        run(claude, env=model.env(home), prompt='@@text on it\\n@@tool Bash {"command": "date"}\\n@@text done')
        assert model.wait_request(2, 30).wait_outcome(30) == "done"

**What it speaks.** Anthropic's Messages API over HTTP/1.1: `POST /v1/messages` with and without `stream`,
`/v1/messages/count_tokens`, `GET /v1/models`. It listens on 127.0.0.1 only and needs no key.

**How it is scripted.** Each line of the prompt that begins with `@@` is a directive. They are read from the last user
text of the request; the n-th model call after that text plays the n-th step. The server counts the assistant's messages
that follow the text, so it remembers nothing of a session: agents may run at once, die, and resume. A step ends after
its last adjacent `@@tool`, or at `@@next`. When the script is used up, or there is none, the reply is "ok". A script
that reaches the agent at work takes the place of the one that was playing; plain words do not.

    @@text WORDS                  say WORDS; adjacent ones are deltas of one text block
    @@slow N SECONDS [WORDS]      N deltas, SECONDS apart, of WORDS, or else "tick1 ", "tick2 ", …
    @@big BYTES                   that much text
    @@think WORDS                 a thinking block
    @@tool NAME JSON              call a tool; adjacent ones are called in parallel
    @@sleep SECONDS               a pause; before anything was said, the headers wait too
    @@hang                        say no more; before anything was said, not even the headers
    @@stall                       the same, but the headers and message_start are sent in any case
    @@error STATUS [TIMES]        an HTTP error; nothing may be said before it
    @@overflow [TIMES]            the HTTP error of a prompt that is too long
    @@sseerror TYPE [TIMES]       an error event in mid-stream (as an HTTP error if the call does not stream)
    @@drop [TIMES]                reset the connection in mid-stream
    @@next                        the end of a step

With TIMES a failure happens only so often for this very prompt (plain words beside the directives make a prompt one of
its kind); from then on it counts as not written, and what follows it plays. A line that begins with `@@` and is none of
these is answered with HTTP 400 and a message that names it. A request that offers no tools (a title is wanted, a quota
probed) plays nothing and gets "ok".

`python -m banksman.testing.fake_model` is the same as a process.
"""

from __future__ import annotations

from banksman.testing.fake_model.model import FakeModel
from banksman.testing.fake_model.record import Request

__all__ = ["FakeModel", "Request"]
