"""Contract test of the server: schemathesis makes requests from /openapi.json and checks each answer.

Plain generated requests name sessions that do not exist and programs that the policy forbids, so nearly all of them end
at 403 and 404. Therefore half of the well-formed requests get ids that exist: a session with the scripted agent, a turn
in it, a command. Malformed requests stay as generated.

The settings of the server under test let callers choose no containment. So a request that names a part of it must be
refused, and before anything else is checked if it is possible otherwise. Half of the possible requests name one.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import schemathesis
from schemathesis import hooks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.engine import events, from_schema
from tests.server.kit import AUTHORIZATION, Served

from banksman.server.server_settings import CHOICES
from banksman.testing import fake_agent

SEED = 6
# The only programs that the policy of the server under test allows.
PROGRAMS: list[Any] = [fake_agent.command()[:-1], "true"]
# A short heartbeat: a reader of a stream soon has enough, and a stalled stream is detected.
SETTINGS: dict[str, Any] = {"programs": PROGRAMS, "heartbeat_seconds": 0.02, "log_level": "debug"}
WAIT_SECONDS = 0.01
# A request that names a part of the containment gets no further than the policy. The other statuses are of a request
# that is malformed elsewhere: its body, token, method or media type.
REFUSALS = {400, 401, 403, 405, 415}


@dataclass
class Found:
    """Result of a run.

    `refused`: requests that named a part of the containment. `failures`: messages, each once.
    """

    statuses: dict[int, int] = field(default_factory=dict[int, int])
    refused: int = 0
    successes: dict[str, int] = field(default_factory=dict[str, int])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    phases: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Wanted:
    """Parameters of a run.

    `group`: the tested routes. `seconds_max`: bound on the time of the run, if any.
    """

    group: str
    examples: int
    is_stateful: bool = False
    has_coverage: bool = True
    has_fuzzing: bool = True
    seconds_max: int | None = None
    seed: int = SEED


# Groups of routes by path. The drain route is left out: it ends the server and has a separate test.
# So is the bundle: each one runs the checks of doctor.
LEFT_OUT = ("/v1/drain", "/v1/sessions/{id}/bundle")
GROUPS: dict[str, Callable[[str], bool]] = {
    "sessions": lambda path: path in ("/v1/sessions", "/v1/sessions/{id}", "/v1/sessions/{id}/why"),
    "turns": lambda path: path.startswith("/v1/sessions/{id}/") and not path.endswith(("/why", "/bundle")),
    "commands": lambda path: path.startswith("/v1/commands"),
    "server": lambda path: not path.startswith(("/v1/sessions", "/v1/commands")) and path != "/v1/drain",
    "all": lambda path: path not in LEFT_OUT,
}


def check(served: Served, wanted: Wanted) -> Found:
    """Run every check against every route of the group.

    The run is in another process, because schemathesis keeps connections open and uses much memory.
    """
    said = subprocess.run(
        [sys.executable, "-m", __name__, str(served.folder), str(served.port), msgspec.json.encode(wanted).decode()],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return msgspec.json.decode(said, type=Found)


def _check(served: Served, wanted: Wanted) -> Found:
    config: Any = cast("Any", schemathesis.Config).from_dict(
        {
            "seed": wanted.seed,
            "base-url": served.url,
            "headers": dict(AUTHORIZATION),
            "request-timeout": 30,
            "max-stream-events": 3,
            **({} if wanted.seconds_max is None else {"max-time": wanted.seconds_max}),
            "generation": {"max-examples": wanted.examples, "database": "none"},
            "phases": {
                "examples": {"enabled": False},
                "coverage": {"enabled": wanted.has_coverage},
                "fuzzing": {"enabled": wanted.has_fuzzing},
                "stateful": {"enabled": wanted.is_stateful},
            },
            # A well-formed request may still be impossible (422): the agent is unknown, or the folder is missing.
            "checks": {"positive_data_acceptance": {"enabled": False}},
        }
    )
    schema: Any = schemathesis.openapi.from_dict(_described(served), config=config)

    def is_meant(context: Any) -> bool:
        return GROUPS[wanted.group](context.operation.path)

    schema = schema.include(is_meant)
    found = Found()
    life = _Life(served)
    with life.given():
        for event in from_schema(schema).execute():
            _look(event, found, life)
    return found


def _described(served: Served) -> dict[str, Any]:
    """Return the server's description, adapted for schemathesis.

    schemathesis reads the schema of an SSE stream as that of each event. The server describes the whole text.
    """
    described = served.get("/openapi.json")
    for path in described["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("200", {}).get("content", {})
            if "text/event-stream" in content:
                data = {"type": "string", "minLength": 2}
                event = {"type": "object", "required": ["data"], "properties": {"data": data}}
                content["text/event-stream"] = {"schema": event}
    return described


def _look(event: Any, found: Found, life: _Life) -> None:
    if isinstance(event, events.NonFatalError | events.FatalError):
        error = event.value if isinstance(event, events.NonFatalError) else event.exception
        found.failures[f"error {getattr(event, 'label', '')}"] = repr(error)
    elif isinstance(event, events.PhaseFinished):
        found.phases[event.phase.name.value] = str(event.status)
    elif isinstance(event, events.ScenarioFinished | events.FuzzScenarioFinished):
        recorder = event.recorder
        for id, interaction in recorder.interactions.items():
            if interaction.response is not None:
                status: int = interaction.response.status_code
                body: Any = cast("Any", recorder).cases[id].value.body
                if isinstance(body, dict) and (parts := _parts(cast("dict[str, Any]", body))):
                    found.refused += 1
                    if status not in REFUSALS if id in life.attacks else status < 400:
                        found.failures.setdefault(f"{status} for {parts}: {recorder.label}", f"{body!r:.1500}")
                found.statuses[status] = found.statuses.get(status, 0) + 1
                if status < 300:
                    found.successes[recorder.label] = found.successes.get(recorder.label, 0) + 1
        for node in itertools.chain.from_iterable(recorder.checks.values()):
            if node.failure_info is not None:
                failure = node.failure_info.failure
                what = f"{failure.message:.1500}\n{node.failure_info.code_sample:.1500}"
                found.failures.setdefault(f"{node.name}: {recorder.label}: {failure.title}", what)


def _parts(body: dict[str, Any]) -> list[str]:
    """Return the parts of the containment that a request chooses."""
    return [part for part in CHOICES if body.get(part) is not None]


class _Life:
    """Replaces generated ids by existing ones in every other request."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._turns = itertools.count()
        self._starts = itertools.count()
        # The ids of requests that would be served without the parts that they name.
        self.attacks: set[str] = set()
        self._session = ""
        self._turn = ""

    @contextlib.contextmanager
    def given(self) -> Generator[None]:
        def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
            del context, kwargs
            self._enliven(case)

        cast("Any", schemathesis).hook(before_call)
        try:
            yield
        finally:
            cast("Any", hooks).unregister(before_call)

    def _enliven(self, case: Any) -> None:
        query: Any = case.query or {}
        if isinstance(query.get("wait"), int | float):
            query["wait"] = min(query["wait"], WAIT_SECONDS)
        elif case.operation.path.endswith("/watch"):
            query["wait"] = WAIT_SECONDS  # The route waits by default.
        if next(self._turns) % 2:
            return
        if case.path_parameters and _is_positive(case, ParameterLocation.PATH):
            case.path_parameters = {**case.path_parameters, **self._existing(case.operation.path)}
        body: Any = case.body
        if isinstance(body, dict) and _is_positive(case, ParameterLocation.BODY):
            self._make_possible(case, cast("dict[str, Any]", body))

    def _existing(self, path: str) -> dict[str, str]:
        served = self._served
        if path.startswith("/v1/commands/"):
            # A command that lives until the end of its input.
            argv = fake_agent.command()
            return {
                "id": served.post(
                    "/v1/commands", {"argv": argv, **({"pty": True} if "resize" in path else {"stdin": "pipe"})}
                )["id"]
            }
        if not self._session or path == "/v1/sessions/{id}":
            self._session = served.open({"prompt": ["say hello"]})
            self._turn = served.ask(self._session, "hello")
            served.outcome(self._session, self._turn)
        return {"id": self._session, **({"turn": self._turn} if "{turn}" in path else {})}

    def _make_possible(self, case: Any, body: dict[str, Any]) -> None:
        path: str = case.operation.path
        for name in ("cwd", "env", "mcp_servers", "options", "rules", "resume", "fork", "schema", "agent"):
            body.pop(name, None)
        if path == "/v1/commands":
            body["argv"] = ["true", *body["argv"][1:3]]
        elif path == "/v1/sessions":
            body["command"] = fake_agent.command()
            body["args"] = []
        elif path.endswith("/turns") and body.get("on_busy") not in (None, "reject"):
            body.pop("on_busy")
        if path in ("/v1/commands", "/v1/sessions"):
            self._attack_or_not(case, body)

    def _attack_or_not(self, case: Any, body: dict[str, Any]) -> None:
        if next(self._starts) % 2 and _parts(body):
            body.pop("fallback", None)
            # A request with a key that was used before is refused for that.
            case.headers.pop("Idempotency-Key", None)
            self.attacks.add(case.id)
        else:
            for part in CHOICES:
                body.pop(part, None)


def _is_positive(case: Any, location: ParameterLocation) -> bool:
    component = None if case.meta is None else case.meta.components.get(location)
    return component is not None and component.mode.is_positive


def main(folder: str, port: str, wanted: str) -> None:
    served = Served(Path(folder))
    served.port = int(port)
    found = _check(served, msgspec.json.decode(wanted, type=Wanted))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
