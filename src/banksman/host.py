"""The public `Host`: `runtime/base_host.py` with a storage engine chosen by a store name.

A store name is `sqlite:PATH`, `memory:` or `nats://HOST`. This module parses it and opens the
engine. `Host` adds the calls that need an engine: export and import of a session, a bundle for a
bug report, the cluster, and the labels that a session needs. Sessions, drain and close are in
`runtime/base_host.py`. Commands are in `commands/command_starter.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl

from banksman.errors import UsageError
from banksman.folders import state_folder
from banksman.runtime import base_host
from banksman.runtime.base_host import HOLD_SECONDS, SettleTime

if TYPE_CHECKING:
    from banksman.cluster.interfaces import Cluster
    from banksman.core.session.budget import Budget
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import Permit
    from banksman.store.log import Log

# Start of the settings after a path, as in `sqlite:PATH?level=full&keep_bytes=1000000`.
SETTING = re.compile(r"\?(?=(level|keep_bytes|keep_seconds)=)")
# Prefixes of stores that hosts of many machines share.
CLUSTER = ("nats://", "tls://")


class Host(base_host.Host):
    """Owns sessions and commands of one loop: `async with Host() as host`, or call `close()`.

    `store`: where the log of sessions is kept.
    - "sqlite:PATH": a file, which several hosts may share. The default is `banksman/store.db` in
      the user's state folder (`$XDG_STATE_HOME`, else `~/.local/state`).
    - "memory:": nothing outlives this object.
    - "nats://HOST:4222": a cluster of hosts on many machines.

    Settings may follow the path of a file. With `?level=full` acknowledged events survive a power
    cut, at the price of a sync per commit. The default, `normal`, survives any death of processes.
    `keep_bytes=` and `keep_seconds=` limit how many events of a session are kept, as far as the
    host does not need the older events.

    `secrets`: removed from each event before it is logged. If an agent streams a secret in pieces,
    at most three of its characters are logged: docs/guarantees.md states the limits.
    `processes_max`: limit on agent processes. The session that was idle for the longest time makes
    room, and resumes its conversation at the next ask. `starts_max`: limit on simultaneous starts;
    None: one per core.

    `user_helper`: the words, such as `("sudo", "-n")`, of a program with more privileges. It starts
    commands of another `user` if this process may not (`… -u USER -- …`). It also ends processes
    that this process may not signal (`… kill …`).

    `address`: where other programs find this host; `NotOwner` reports it. `permit`: gets the
    recorded spec of a session before the session is opened again with it, and raises if that is not
    allowed.

    `budget`: caps on what all sessions of the store may use in a day (UTC): see `open`.
    `caller_budgets`: the same for callers (`ask(caller=…)`), by name; `"*"` is the budget of each
    caller without another one. At a cap no turn is sent until the next day, and the `on_budget` of
    each session decides about its running turn.

    `survive`: "crash": if this host is killed, its agents work on for `hold_seconds`, and the next
    host that opens the store continues their turns. That holds for each session that another
    program can open from the store alone. None (the default): the agents end with their host.

    On entry, or with the first session, the host settles sessions that were open on hosts that have
    died.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        secrets: Sequence[str] = (),
        processes_max: int | None = None,
        starts_max: int | None = None,
        address: str = "",
        permit: Permit | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
        user_helper: Sequence[str] | None = None,
        budget: Budget | Mapping[str, float] | None = None,
        caller_budgets: Mapping[str, Budget | Mapping[str, float]] | None = None,
        survive: str | None = None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        opens, settles = _engine(store, address)
        if secrets:
            from banksman.core.redaction.redactor import Redactor  # noqa: PLC0415

            Redactor(secrets)  # An invalid secret is an error of this call.
        if budget is not None or caller_budgets is not None:
            from banksman.sessions.arguments import checked_budgets  # noqa: PLC0415

            checked_budgets(budget, caller_budgets)  # The same.
        if survive is not None:
            from banksman.process.tree_hand_over import check_hold  # noqa: PLC0415
            from banksman.sessions.arguments import checked_survive  # noqa: PLC0415

            checked_survive(survive)  # The same.
            check_hold(hold_seconds, bytes(32))
            if store == "memory:" or (store or "").startswith(CLUSTER):
                message = "cannot survive a crash of the host: its store is not a file"
                raise UsageError(message, hint="use sqlite:PATH, or leave survive out")
        super().__init__(
            opens,
            settles=settles,
            secrets=secrets,
            processes_max=processes_max,
            starts_max=starts_max,
            permit=permit,
            finished_max=finished_max,
            finished_seconds_max=finished_seconds_max,
            user_helper=user_helper,
            budget=budget,
            caller_budgets=caller_budgets,
            survive=survive,
            hold_seconds=hold_seconds,
        )

    async def export(self, session: Session | str, path: str | os.PathLike[str]) -> None:
        """Write the whole history of a session to a new file, as NDJSON: see `import_session`."""
        from banksman.store import transfer  # noqa: PLC0415

        await transfer.export_to(self._own_sessions().store, self._id(session), path)

    async def import_session(
        self, path: str | os.PathLike[str], *, name: str | None = None
    ) -> Session:
        """Create a session with a new id from an exported file; completely, or not at all."""
        from banksman.sessions.arguments import checked_name  # noqa: PLC0415
        from banksman.store import transfer  # noqa: PLC0415

        self._bind()
        sessions = self._own_sessions()
        id = f"s-{os.urandom(8).hex()}"
        name = checked_name(name, sessions.redactor)
        await transfer.import_session(
            sessions.store, path, session=id, name=name, redactor=sessions.redactor
        )
        return self.session(id)

    async def bundle(
        self, session: Session | str, path: str | os.PathLike[str], *, text: bool = True
    ) -> None:
        """Write the frames of both directions to a new file, without secrets, for a bug report.

        The fake agent can replay the file. `text`: False also removes the words of the
        conversation.
        """
        from banksman.store import bundle  # noqa: PLC0415

        store = self._own_sessions().store
        await bundle.bundle(store, self._id(session), path, secrets=self._secrets, text=text)

    def export_lines(self, session: Session | str) -> AsyncGenerator[bytes]:
        """Return the lines of an export: see `export`. The first one raises its errors."""
        from banksman.store import transfer  # noqa: PLC0415

        return transfer.export(self._own_sessions().store, self._id(session))

    def bug_report(
        self,
        session: Session | str,
        parts: Mapping[str, Callable[[], Awaitable[bytes]]],
        *,
        text: bool = True,
    ) -> AsyncGenerator[bytes]:
        """Return a zip archive of the bundle of a session and further parts, in pieces.

        `parts`: functions that make the contents, by the name in the archive. Secrets and personal
        data are removed from them, too. `text`: see `bundle`.
        """
        from banksman.store import bug_report, bundle  # noqa: PLC0415

        scrub = bundle.scrubber(self._secrets)
        store = self._own_sessions().store
        return bug_report.archive(store, self._id(session), parts, scrub=scrub, text=text)

    @property
    def cluster(self) -> Cluster | None:
        """The cluster of the hosts that share the store; None if the store is on this machine."""
        return cast("Cluster | None", getattr(self._own_sessions().store, "cluster", None))

    async def ready(self) -> None:
        """Wait until the store can be queried."""
        self._bind()
        await self._own_sessions().store.ready()

    async def need_of(self, session: str) -> list[str]:
        """Return the labels that a host needs to resume a session: `sessions/host_needs.py`."""
        from banksman.sessions import host_needs  # noqa: PLC0415

        store = self._own_sessions().store
        known = store.find(session)
        return [] if known is None else await host_needs.read(store, known)

    def _id(self, session: Session | str) -> str:
        self._bind()
        return self.session(session).id if isinstance(session, str) else session.id


def default_path() -> Path:
    """Return the path of the default store."""
    return state_folder() / "store.db"


def _engine(store: Any, address: str) -> tuple[Callable[[], Log], SettleTime]:
    """Return the function that opens the log, and when the store is first needed.

    A missing file has nothing to settle, and a program that only runs commands must not create one.
    An existing default file that cannot be opened must not stop that program either. An explicitly
    named file must.
    """
    if store is None:
        settles = _when(default_path, SettleTime.AT_START_IF_IT_CAN)
        return lambda: _open_sqlite(str(default_path()), {"address": address}), settles
    if store == "memory:":
        return _open_memory, SettleTime.WHEN_NEEDED
    if isinstance(store, str) and store.startswith("sqlite:") and store != "sqlite:":
        path, settings = _parse(store.removeprefix("sqlite:"))
        return lambda: _open_sqlite(path, {**settings, "address": address}), _when(
            lambda: Path(path), SettleTime.AT_START
        )
    if isinstance(store, str) and store.startswith(CLUSTER):
        # The hosts that take over the sessions of a dead host settle its leftovers.
        return _open_cluster(store), SettleTime.WHEN_NEEDED
    raise _unusable(store)


def _unusable(store: object) -> UsageError:
    from banksman.cluster import store_address  # noqa: PLC0415

    message, hint = store_address.why_unusable(store)
    return UsageError(message, hint=hint)


def _when(path: Callable[[], Path], settles: SettleTime) -> SettleTime:
    try:
        return settles if _is_there(path()) else SettleTime.WHEN_NEEDED
    except (UsageError, OSError):
        return SettleTime.WHEN_NEEDED  # A session that needs the store gets the error.


def _is_there(path: Path) -> bool:
    """Whether the store exists, or commits beside it whose file is gone.

    The second case is damage, and is reported as early as any other damage.
    """
    log = Path(f"{os.path.realpath(path)}-wal")
    return path.exists() or (log.exists() and log.stat().st_size > 0)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    if text.startswith((":memory:", "file:")):
        raise _unusable(f"sqlite:{text}")
    path, *rest = SETTING.split(text, maxsplit=1)
    settings: dict[str, Any] = {}
    for name, value in parse_qsl(rest[-1], keep_blank_values=True) if rest else ():
        match name:
            case "level" if value in ("full", "normal"):
                settings["level"] = value
            case "keep_bytes" | "keep_seconds" if value.isdecimal() and int(value) > 0:
                settings[{"keep_bytes": "bytes_max", "keep_seconds": "seconds_max"}[name]] = int(
                    value
                )
            case _:
                hint = "use level=full or normal, keep_bytes= or keep_seconds= with a number"
                raise UsageError(f"a store cannot have {name}={value}", hint=hint)
    if not path:
        return str(default_path()), settings  # As in `sqlite:?keep_bytes=…`.
    # Absolute, so that the path stays valid if the program changes its folder.
    return os.path.abspath(os.path.expanduser(path)), settings


# Loaded with the first session, like all other modules that sessions need.
def _open_memory() -> Log:
    from banksman.store.memory import MemoryLog  # noqa: PLC0415

    return MemoryLog()


def _open_sqlite(path: str, settings: dict[str, Any]) -> Log:
    from banksman.store.sqlite import SqliteLog  # noqa: PLC0415

    return cast("Log", SqliteLog(path, **settings))


def _open_cluster(store: str) -> Callable[[], Log]:
    """Return the function that opens a cluster log. An invalid address raises immediately."""
    from banksman.cluster import store_address  # noqa: PLC0415

    where = store_address.parse(store)

    def opens() -> Log:
        try:
            from banksman.cluster.log import ClusterLog  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] != "nats":
                raise
            hint = "run pip install 'banksman[cluster]'"
            raise UsageError(
                f"a store on NATS needs {exc.name}, which is not installed", hint=hint
            ) from exc
        folder = state_folder() / "journals" if where.journal is None else Path(where.journal)
        return cast("Log", ClusterLog(where, folder))

    return opens
