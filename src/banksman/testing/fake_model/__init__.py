"""Fake model APIs on loopback, scripted from the prompt: real agents run offline and without a key.

    with FakeModel() as model:
        prompt = '@@text on it\\n@@tool Bash {"command": "date"}\\n@@text done'
        run(claude, env=model.env(home), prompt=prompt)
        assert model.wait_request(2, 30).wait_outcome(30) == "done"

**APIs.** The server has four APIs over HTTP/1.1, each with and without streaming. It listens on
127.0.0.1 only and needs no key. `env` and `args` return the settings that each agent needs.

    anthropic    POST /v1/messages, /v1/messages/count_tokens           Claude Code
    responses    POST /v1/responses, /v1/responses/compact              Codex, codex-acp
    chat         POST /v1/chat/completions                              opencode, Qwen Code, Copilot
    gemini       POST /v1beta/models/M:generateContent, :countTokens …  Gemini CLI
                 GET /v1/models, /v1beta/models

**Scripts.** Each line of the prompt that begins with `@@` is a directive. The server reads the
directives from the last user text of the request. The n-th model call after that text plays the
n-th step. The server counts the messages of the model that follow the text, so it keeps no session
state. Agents may run concurrently, die, and resume.

A step ends after its last adjacent `@@tool`, or at `@@next`. When no step is left, or the prompt
has no script, the reply is "ok". A script that arrives while the agent works replaces the current
one. Plain words do not, where the API shows (Claude Code) that they are not a separate prompt.

    @@text WORDS                  say WORDS; adjacent ones are deltas of one text block
    @@slow N SECONDS [WORDS]      N deltas, SECONDS apart, of WORDS, or else "tick1 ", "tick2 ", …
    @@big BYTES                   text of that size
    @@think WORDS                 a thinking block, or the equivalent of the API
    @@tool NAME JSON              call a tool; adjacent ones are called in parallel
    @@sleep SECONDS               a pause; before any output, the headers wait too
    @@wait PATH                   a pause until the file exists
    @@hang                        stop sending; before any output, not even the headers are sent
    @@stall                       like @@hang, but send the headers and the start of the message
    @@error STATUS [TIMES]        an HTTP error; no output may come before it
    @@overflow [TIMES]            the HTTP error for a prompt that is too long
    @@throttle SECONDS [TIMES]    HTTP 429 with Retry-After: a short throttle
    @@limit SECONDS [TIMES]       HTTP 429 of an account whose usage window resets in SECONDS
    @@used PERCENT SECONDS        report this use of the account's window, which resets in SECONDS
    @@sseerror TYPE [TIMES]       an error event in mid-stream, TYPE as the API names it (an HTTP
                                  error if the call does not stream)
    @@drop [TIMES]                reset the connection in mid-stream
    @@next                        the end of a step

With TIMES, a failure happens only that many times for the same prompt. After that, the server skips
the directive and plays the directives behind it. Plain words beside the directives make a prompt
unique.

The server answers an unknown `@@` line with HTTP 400 and a message that names the line. A request
without tools (for a title, or a quota probe) plays no script and gets "ok".

`python -m banksman.testing.fake_model` runs the server as a process.
"""

from __future__ import annotations

from banksman.testing.fake_model.model import FakeModel
from banksman.testing.fake_model.record import ModelRequest as Request

__all__ = ["FakeModel", "Request"]
