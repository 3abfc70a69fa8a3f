"""All settings as data: name, accepted values, default and purpose of each key.

`KEYS` is the source for `banksman config init`, the names of variables, the checks and the help. A
test compares the keys of `[serve]` with `ServerSettings`.
"""

from __future__ import annotations

from collections.abc import Iterable

from banksman.config.config_key import ConfigKey, ValueKind

# The comment above each table of the template.
TABLES = {
    "serve": "The server: `banksman serve`, and `banksman host`.",
    "run": "`banksman run`.",
}

_TOP = (
    ConfigKey(
        name="url",
        kind=ValueKind.TEXT,
        what="The server that verbs use.",
        usual="this user's running server, else an embedded host",
        example="http://127.0.0.1:4380",
    ),
    ConfigKey(
        name="store",
        kind=ValueKind.TEXT,
        what=(
            'The store of sessions: "sqlite:PATH", "memory:" or "nats://HOST". '
            "[serve] may set another."
        ),
        usual="store.db in the state folder",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="format",
        kind=ValueKind.TEXT,
        what="The output format of verbs.",
        default="text",
        choices=("text", "json", "quiet"),
    ),
    ConfigKey(
        name="agent",
        kind=ValueKind.TEXT,
        what="The default agent. `banksman agents` lists all agents.",
        default="claude",
    ),
    ConfigKey(
        name="fallback",
        kind=ValueKind.WORDS,
        what=(
            "Agents that serve a new session while its agent is limited or not installed, "
            "for `open`, `run` and `ask --open`."
        ),
        default=[],
        example=["codex", "gemini"],
    ),
    ConfigKey(
        name="token",
        kind=ValueKind.TEXT,
        what="The token for a server on another machine.",
        usual="the token of this user's server, from the state folder",
        is_secret=True,
        is_in_file=False,
    ),
    ConfigKey(
        name="cafile",
        kind=ValueKind.TEXT,
        what="The CA certificates (PEM) that verbs trust for a server at https://.",
        usual="the CA certificates of this machine",
        example="/etc/banksman/tls/ca.pem",
    ),
)

_SERVE = (
    ConfigKey(
        name="serve.bind",
        kind=ValueKind.TEXT,
        what="The address to listen on.",
        default="127.0.0.1",
    ),
    ConfigKey(
        name="serve.port",
        kind=ValueKind.WHOLE,
        what="The port to listen on; 0 for any free port.",
        default=4380,
    ),
    ConfigKey(
        name="serve.allow_remote",
        kind=ValueKind.FLAG,
        what="Allow an address that other machines can reach. Set tls_cert and tls_key for it.",
        default=False,
    ),
    ConfigKey(
        name="serve.hosts",
        kind=ValueKind.WORDS,
        what="Host names, besides those of loopback, under which a proxy publishes this server.",
        default=[],
        example=["banksman.example.org"],
    ),
    ConfigKey(
        name="serve.trusted_proxies",
        kind=ValueKind.WORDS,
        what="Proxies that name their users in X-Forwarded-User: TOKEN-NAME@ADDRESS.",
        default=[],
        example=["sso@127.0.0.1"],
    ),
    ConfigKey(
        name="serve.tls_cert",
        kind=ValueKind.TEXT,
        what=(
            "The file of the certificate chain (PEM). The port then speaks https only. "
            "A changed file is used for new connections."
        ),
        usual="plain http",
        example="/etc/banksman/tls/fullchain.pem",
    ),
    ConfigKey(
        name="serve.tls_key",
        kind=ValueKind.TEXT,
        what="The file of the certificate's key (PEM, not encrypted).",
        usual="plain http",
        example="/etc/banksman/tls/privkey.pem",
    ),
    ConfigKey(
        name="serve.store",
        kind=ValueKind.TEXT,
        what="The store of the server, if it differs from `store`.",
        usual="the value of `store`",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="serve.keep_bytes",
        kind=ValueKind.WHOLE,
        what="The maximum number of bytes of events to keep per session.",
        usual="no limit",
        example=1 << 30,
    ),
    ConfigKey(
        name="serve.keep_seconds",
        kind=ValueKind.WHOLE,
        what="The number of seconds to keep events.",
        usual="no limit",
        example=30 * 24 * 3600,
    ),
    ConfigKey(
        name="serve.token",
        kind=ValueKind.TEXT,
        what="The token, 8 characters or more. Prefer token_file.",
        usual="the token in token_file",
        example="…",
        is_secret=True,
    ),
    ConfigKey(
        name="serve.token_file",
        kind=ValueKind.TEXT,
        what="The file of the token; created at the first start, only for this user.",
        usual="token in the state folder",
        example="/etc/banksman/token",
    ),
    ConfigKey(
        name="serve.programs",
        kind=ValueKind.PROGRAMS,
        what=(
            "The programs that callers may start: a name, a path, or the first words of a command."
        ),
        usual="all programs",
        example=["claude", ["python3", "-m", "agent"]],
    ),
    ConfigKey(
        name="serve.env",
        kind=ValueKind.WORDS,
        what="The variables that callers may set while `programs` is set.",
        default=[],
        example=["LANG"],
    ),
    ConfigKey(
        name="serve.roots",
        kind=ValueKind.WORDS,
        what="The folders in which callers may start programs.",
        usual="all folders",
        example=["/srv/work"],
    ),
    ConfigKey(
        name="serve.user_helper",
        kind=ValueKind.WORDS,
        what="The command prefix that starts a command as another user.",
        usual="none",
        example=["sudo", "-n"],
    ),
    ConfigKey(
        name="serve.agent_user",
        kind=ValueKind.TEXT,
        what="The user that agents run as.",
        usual="what the agent's profile says, else the server's user",
        example="agent",
    ),
    ConfigKey(
        name="serve.agent_limits",
        kind=ValueKind.WORDS,
        what="Limits of each process of an agent, or of its tree, as NAME=NUMBER.",
        default=[],
        example=["nofile=1024", "nice=5"],
    ),
    ConfigKey(
        name="serve.agent_scrub",
        kind=ValueKind.WORDS,
        what='Variables that agents do not get: "secrets", "nesting", or names.',
        usual="what the agent's profile says",
        example=["nesting", "secrets", "KUBECONFIG"],
    ),
    ConfigKey(
        name="serve.agent_wrap",
        kind=ValueKind.WORDS,
        what="The prefix of the commands of agents, with {cwd}, {session} and {command}.",
        usual="what the agent's profile says, else none",
        example=["firejail", "--quiet", "--whitelist={cwd}"],
    ),
    ConfigKey(
        name="serve.agent_sandbox",
        kind=ValueKind.TEXT,
        what="A known prefix, in place of agent_wrap: bwrap, unshare, ssh:HOST, docker:BOX.",
        usual="none",
        example="bwrap",
    ),
    ConfigKey(
        name="serve.agent_on_open",
        kind=ValueKind.WORDS,
        what="The command that makes what a session works in, with {cwd} and {session}.",
        usual="what the agent's profile says, else none",
        example=["git", "-C", "/srv/house", "worktree", "add", "{cwd}"],
    ),
    ConfigKey(
        name="serve.agent_on_close",
        kind=ValueKind.WORDS,
        what="The command that removes it, after the session is closed.",
        usual="what the agent's profile says, else none",
        example=["git", "-C", "/srv/house", "worktree", "remove", "{cwd}"],
    ),
    ConfigKey(
        name="serve.callers_choose",
        kind=ValueKind.WORDS,
        what="What callers may choose for an agent: user, limits, scrub, wrap, on_open, on_close, "
        "survive.",
        default=[],
        example=["limits"],
    ),
    ConfigKey(
        name="serve.processes_max",
        kind=ValueKind.WHOLE,
        what="The maximum number of agent processes at one time.",
        usual="no limit",
        example=8,
    ),
    ConfigKey(
        name="serve.secrets",
        kind=ValueKind.WORDS,
        what="Texts that are never written to the store or to log lines.",
        default=[],
        example=["…"],
        is_secret=True,
    ),
    ConfigKey(
        name="serve.budget",
        kind=ValueKind.TEXT,
        what=(
            "What all sessions may use in a day (UTC): "
            "caps on tokens, usd (an estimate), working_seconds and turns."
        ),
        usual="no limit",
        example="tokens=5000000,turns=500",
    ),
    ConfigKey(
        name="serve.caller_budgets",
        kind=ValueKind.WORDS,
        what="The same for each caller, as CALLER:BUDGET; `*` stands for any other caller.",
        default=[],
        example=["alice:tokens=1000000", "*:turns=50"],
    ),
    ConfigKey(
        name="serve.name",
        kind=ValueKind.TEXT,
        what="The name of this host among the hosts that share a store (nats://…).",
        usual="the name of the machine",
        example="build-1",
    ),
    ConfigKey(
        name="serve.labels",
        kind=ValueKind.WORDS,
        what="Properties of this host that a session may require.",
        default=[],
        example=["gpu", "repo=x"],
    ),
    ConfigKey(
        name="serve.room",
        kind=ValueKind.WHOLE,
        what="The maximum number of sessions of a shared store on this host.",
        usual="64 for `banksman host`; 0 for a server, which forwards to the other hosts",
        example=16,
    ),
    ConfigKey(
        name="serve.mirror_transcripts",
        kind=ValueKind.FLAG,
        what=(
            "Copy transcripts to the shared store, for hosts that take sessions over. "
            "A transcript that contains a value of `secrets` is not copied; "
            "other credentials are not detected."
        ),
        default=True,
    ),
    ConfigKey(
        name="serve.body_bytes_max",
        kind=ValueKind.WHOLE,
        what="The maximum size of a request, in bytes.",
        default=32 << 20,
    ),
    ConfigKey(
        name="serve.requests_per_second",
        kind=ValueKind.NUMBER,
        what="The maximum number of requests per second of each token.",
        usual="no limit",
        example=50.0,
    ),
    ConfigKey(
        name="serve.requests_burst",
        kind=ValueKind.WHOLE,
        what="How many requests a token may send at once, with requests_per_second.",
        usual="those of ten seconds",
        example=500,
    ),
    ConfigKey(
        name="serve.streams_max",
        kind=ValueKind.WHOLE,
        what="The maximum number of event streams per client.",
        default=1024,
    ),
    ConfigKey(
        name="serve.disk_free_bytes_min",
        kind=ValueKind.WHOLE,
        what=(
            "With less free space on the disk of the store, in bytes, `/readyz` answers 503. "
            "0 accepts a full disk."
        ),
        default=256 << 20,
    ),
    ConfigKey(
        name="serve.heartbeat_seconds",
        kind=ValueKind.NUMBER,
        what="The maximum number of seconds between two messages of a stream.",
        default=15.0,
    ),
    ConfigKey(
        name="serve.stall_seconds",
        kind=ValueKind.NUMBER,
        what="The number of seconds after which a client that reads nothing is disconnected.",
        default=30.0,
    ),
    ConfigKey(
        name="serve.drain_seconds",
        kind=ValueKind.NUMBER,
        what=(
            "The number of seconds that running turns and commands get to finish "
            "when the server stops."
        ),
        default=60.0,
    ),
    ConfigKey(
        name="serve.hand_over",
        kind=ValueKind.FLAG,
        what="Hand the running work over to the next server when this one gets TERM.",
        usual="true under a service manager that sets NOTIFY_SOCKET, else false",
        example=True,
    ),
    ConfigKey(
        name="serve.hold_seconds",
        kind=ValueKind.NUMBER,
        what=(
            "The number of seconds that processes which were handed over wait for the next server."
        ),
        default=60.0,
    ),
    ConfigKey(
        name="serve.survive",
        kind=ValueKind.TEXT,
        what=(
            "What agents survive. crash: if the server is killed, its agents work on for "
            "hold_seconds, and the next server continues their turns."
        ),
        usual="agents end with their server",
        example="crash",
        choices=("crash",),
    ),
    ConfigKey(
        name="serve.webhooks",
        kind=ValueKind.WORDS,
        what="The URLs that get events of sessions.",
        default=[],
        example=["https://hooks.example.org/banksman"],
        # A path may contain a key.
        is_secret=True,
    ),
    ConfigKey(
        name="serve.webhook_hosts",
        kind=ValueKind.WORDS,
        what="The names, addresses and networks, besides this machine, that webhooks may go to.",
        default=[],
        example=["hooks.example.org", "10.1.0.0/16"],
    ),
    ConfigKey(
        name="serve.webhook_events",
        kind=ValueKind.WORDS,
        what="The events that webhooks get.",
        default=["turn.ended", "question.asked", "session.lost", "budget.warning"],
    ),
    ConfigKey(
        name="serve.webhook_secret_file",
        kind=ValueKind.TEXT,
        what="The file of the key that signs webhooks; created at the first start.",
        usual="webhook-secret in the state folder",
        example="/etc/banksman/webhook-secret",
    ),
    ConfigKey(
        name="serve.otel_endpoint",
        kind=ValueKind.TEXT,
        what="The OpenTelemetry collector (OTLP over HTTP) that gets spans of turns and tools.",
        usual="none",
        example="http://127.0.0.1:4318",
    ),
    ConfigKey(
        name="serve.otel_content",
        kind=ValueKind.FLAG,
        what="Put prompts, outputs, and the input and output of tools into spans.",
        default=False,
    ),
    ConfigKey(
        name="serve.log_format",
        kind=ValueKind.TEXT,
        what="The format of log lines.",
        default="text",
        choices=("text", "json"),
    ),
    ConfigKey(
        name="serve.log_level",
        kind=ValueKind.TEXT,
        what="The lowest level of log lines to write.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
)

_RUN = (
    ConfigKey(
        name="run.priority",
        kind=ValueKind.TEXT,
        what="The priority of the turn: interactive, normal, background, or a number.",
        default="normal",
    ),
    ConfigKey(
        name="run.on_question",
        kind=ValueKind.TEXT,
        what="How to answer a question of the agent. ask: ask the user. fail: stop the turn.",
        default="ask",
        choices=("ask", "allow", "deny", "fail"),
    ),
    ConfigKey(
        name="run.on_limit",
        kind=ValueKind.TEXT,
        what="What the turn does while the agent's account is limited. wait: for the limit's end.",
        default="fail",
        choices=("fail", "wait"),
    ),
)

KEYS: dict[str, ConfigKey] = {key.name: key for key in (*_TOP, *_SERVE, *_RUN)}


# Words below this similarity (0 to 1) are not the same word with a typing error.
_SIMILARITY_MIN = 0.6


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word with the most similar spelling; None if no word is similar."""
    # Loaded only for a misspelt word.
    from difflib import get_close_matches  # noqa: PLC0415

    found = get_close_matches(word, sorted(known), 1, _SIMILARITY_MIN)
    return found[0] if found else None


def nearest_key(name: str) -> ConfigKey | None:
    """Return the key with the most similar name, with or without its table; None if none is."""
    # A full name comes first: `store` is also the short name of `serve.store`.
    named = {key.short: key for key in KEYS.values()} | KEYS
    found = nearest(name, named)
    return None if found is None else named[found]
