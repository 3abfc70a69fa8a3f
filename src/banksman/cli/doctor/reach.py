"""Check the server that verbs would use, and the installed agents. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator

import banksman
from banksman.cli.client.client import Client
from banksman.cli.client.discovery import find, is_there
from banksman.cli.client.exchange import ClientError, NotLetIn
from banksman.cli.doctor import Check, DoctorOptions, Finding, note, ok, wrong
from banksman.sessions import known_agents


def checks(_: DoctorOptions) -> list[Check]:
    return [server, agents]


def server() -> Iterator[Finding]:
    """Check that the server answers, accepts the token and has the same version."""
    from banksman import config  # noqa: PLC0415

    place = find()
    chosen = config.load()["url"]
    if place is None:
        yield ok("server", "none is running: verbs start an embedded host")
        return
    if not is_there(place):
        if chosen.is_set:
            fix = f"start the server, or remove the url from {chosen.origin}"
            yield wrong(
                "server", f"no server answers at {place.url}, which {chosen.origin} names", fix
            )
        else:
            seen = f"no server answers at {place.url}: it died and left its announcement"
            yield note("server", seen, "banksman doctor --sweep")
        return
    try:
        found = Client(lambda: place).get("/v1/server")
    except NotLetIn as exc:
        yield wrong(
            "server", exc.args[0], exc.hint or "set BANKSMAN_TOKEN to the token of that server"
        )
        return
    except ClientError as exc:
        yield wrong("server", exc.args[0], exc.hint or "check that Banksman listens there")
        return
    seen = f"{place.url}, process {found['pid']}, version {found['version']}"
    if found["version"] != banksman.__version__:
        fix = "restart the server: banksman drain, then banksman serve"
        yield note("server", f"{seen}; this program is version {banksman.__version__}", fix)
    elif found["draining"]:
        yield note("server", f"{seen}, is draining and about to exit")
    else:
        yield ok("server", seen)


def agents() -> Iterator[Finding]:
    """Check the agent files, and report which known agents are installed."""
    found = known_agents.find_agents()
    for each in found:
        if each.error is not None:
            yield wrong("agents", each.error, f"correct {each.source}, or remove it")
    here = [each.name for each in found if each.path is not None]
    if here:
        yield ok("agents", f"{', '.join(here)}")
    else:
        fix = "run `banksman agents` to see how to install each"
        yield note("agents", "no known agent is on PATH", fix)
