"""Model APIs on loopback, scripted from the prompt, so that real agents run offline and without a key.

    with FakeModel() as model:
        run(claude, env=model.env(home), prompt='@@text on it\\n@@tool Bash {"command": "date"}\\n@@text done')
        assert model.wait_request(2, 30).wait_outcome(30) == "done"

**What it speaks.** Four APIs over HTTP/1.1, each with and without a stream. It listens on 127.0.0.1 only and needs no
key. `env` and `args` have what each agent must be told.

    anthropic    POST /v1/messages, /v1/messages/count_tokens               Claude Code
    responses    POST /v1/responses, /v1/responses/compact                  Codex, codex-acp
    chat         POST /v1/chat/completions                                  opencode, Qwen Code, Copilot
    gemini       POST /v1beta/models/M:generateContent, :countTokens …      Gemini CLI
                 GET /v1/models, /v1beta/models

**How it is scripted.** Each line of the prompt that begins with `@@` is a directive. They are read from the last user
text of the request; the n-th model call after that text plays the n-th step. The server counts the model's messages
that follow the text, so it remembers nothing of a session: agents may run at once, die, and resume. A step ends after
its last adjacent `@@tool`, or at `@@next`. When the script is used up, or there is none, the reply is "ok". A script
that reaches the agent at work takes the place of the one that was playing; plain words do not where it can be told
(Claude Code) that they are no prompt of their own.

    @@text WORDS                  say WORDS; adjacent ones are deltas of one text block
    @@slow N SECONDS [WORDS]      N deltas, SECONDS apart, of WORDS, or else "tick1 ", "tick2 ", …
    @@big BYTES                   that much text
    @@think WORDS                 a thinking block, or what the API has in its place
    @@tool NAME JSON              call a tool; adjacent ones are called in parallel
    @@sleep SECONDS               a pause; before anything was said, the headers wait too
    @@hang                        say no more; before anything was said, not even the headers
    @@stall                       the same, but the headers and the start of the message are sent in any case
    @@error STATUS [TIMES]        an HTTP error; nothing may be said before it
    @@overflow [TIMES]            the HTTP error of a prompt that is too long
    @@sseerror TYPE [TIMES]       an error event in mid-stream, by the API's own name for it (as an HTTP error if the
                                  call does not stream)
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
from banksman.testing.fake_model.record import ModelRequest as Request

__all__ = ["FakeModel", "Request"]
