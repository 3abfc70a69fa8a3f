"""Host side of a child that runs: its streams, and the control socket to its keeper.

The keeper is the parent process of the child (`keeper/keeper.py`). `KeptProcess` owns the control
socket, the streams and a use of the zygote. It takes no decisions about a stop: it reports events
as facts to `on_fact`, and its methods carry out orders. Nothing here awaits, so a cancelled task
cannot leave an operation half done. `KeptProcess` never signals a pid. Every signal is a request to
the keeper, because only the keeper knows whether that pid is still the child.

A host gets a child in one of two ways. It starts the child (`process.py`), or it takes the child
over from another host (`adoption.py`). From then on both are the same.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from banksman.core.process_facts import (
    Exited,
    KeeperActed,
    ProcessesSwept,
    ProcessFact,
    Stream,
    Survivor,
    Swept,
    TreeEnded,
)
from banksman.errors import Refused
from banksman.process import cgroups, syscalls
from banksman.process.keeper import messages
from banksman.process.pipes import PipeWriter
from banksman.process.stdio import ChildStreams, Size
from banksman.process.sweep_requests import OpenSweeps, StartedSince
from banksman.process.zygote_client import ZygoteHandle, spawner

if TYPE_CHECKING:
    from banksman.process.tree_hand_over import HandOverRequest, Survival

# Pause before a message is sent again that the keeper must get.
_RETRY_SECONDS = 0.005


class KeptProcess:
    """One child under a keeper, until the report that its tree is gone."""

    _zygote: ZygoteHandle | None = None

    def __init__(self, *, grace: float, on_fact: Callable[[ProcessFact], None]) -> None:
        self.pid: int | None = None
        # The parent process of the child, known with its pid.
        self.keeper_pid: int | None = None
        self.grace = grace
        self.stdin: PipeWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._on_fact = on_fact
        self._has_exited = False
        self._is_out_of_memory = False
        self._has_ended = False
        self._is_over = False
        self._control: _socket.socket | None = None
        self._streams: ChildStreams | None = None
        self._started_since = StartedSince()
        self._sweeps = OpenSweeps(self._loop, self.hear_now, on_fact)
        # Set from the request of a hand-over to its answer. Meanwhile nothing is read.
        self._hand_over: HandOverRequest | None = None
        self._failed_hand_over: HandOverRequest | None = None
        # Set from the request on: the tree survives the death of this host. The keeper then has a
        # copy of this host's end of the control socket, so closing that end says nothing.
        self._survival: HandOverRequest | None = None
        self._is_lasting = False

    def _begin_to_read(self) -> None:
        """Read the messages of the keeper and the output, from now on."""
        assert self._control is not None
        self._loop.add_reader(self._control.fileno(), self.hear_now)
        self.resume_reading()

    # -- messages of the keeper -------------------------------------------------------------------
    def hear_now(self) -> None:
        """Read the messages that the keeper has sent.

        Callers that must know them before a decision call this too.
        """
        # During a hand-over the messages belong to the successor.
        while self._control is not None and self._hand_over is None:
            try:
                data = syscalls.recv(self._control)
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in syscalls.PASSING:
                    return  # The socket is still readable, so the loop calls again.
                data = b""
            if not data:
                self._on_silence()
                return
            self._on_message(messages.decode(data))

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case (messages.EXITED, code, number, at, by_itself):
                self._on_exited(Exited(code, number, at, by_itself, self._is_out_of_memory))
            case (messages.OUT_OF_MEMORY,):
                self._is_out_of_memory = True
            case (messages.ACTED, *acted):
                self._on_fact(KeeperActed(*acted))
            case (messages.LOST, statuses):
                self._on_lost(statuses)
            case (messages.SWEPT, names):
                others = tuple(Swept(pid, command) for pid, command in names if pid != self.pid)
                self._on_fact(ProcessesSwept(others))
            case (messages.SWEEP_REPORT, number, names, survivors, is_over):
                swept = tuple(Swept(pid, command) for pid, command in names)
                left = tuple(Survivor(*survivor) for survivor in survivors)
                late = self._sweeps.hear(number, swept, left, is_over=is_over)
                if late:
                    self._on_fact(ProcessesSwept(late))
            case (messages.GONE, survivors):
                self._on_gone(tuple(Survivor(*survivor) for survivor in survivors))
            case _:
                raise AssertionError(message)

    def _on_exited(self, fact: Exited) -> None:
        """Report the exit of the leader, once. A keeper and its zygote can both report it."""
        if not self._has_exited:
            self._has_exited = True
            # Data that the child wrote before its exit is reported before the exit. The state
            # machine needs that order to decide whether the child was idle.
            self.read_now()
            self._on_fact(fact)

    def _on_lost(self, statuses: dict[int, int]) -> None:
        """Report the exit after the zygote has ended the tree of a killed keeper."""
        cgroups.prune_again()
        code: int | None = None
        number: int | None = None
        if self.pid in statuses:
            result = os.waitstatus_to_exitcode(statuses[self.pid])
            code, number = (result, None) if result >= 0 else (None, -result)
        self._on_exited(Exited(code, number, time.monotonic()))

    def _on_gone(self, survivors: tuple[Survivor, ...]) -> None:
        if self._has_ended:
            return  # A successor hears it twice if the former host has not read it.
        self._has_ended = True
        # The keeper of a tree that survives its host stays, until `close`.
        if not self._is_lasting:
            self._hang_up()
        self._on_fact(TreeEnded(survivors, time.monotonic()))

    def _on_silence(self) -> None:
        """Report the loss of both the keeper and the zygote: the socket ended without a report.

        This is the limit of the promise that a tree is ended. The tree may still run.
        """
        assert self.pid is not None
        if self._has_ended:
            self._hang_up()
            return
        self._on_exited(Exited(None, None, time.monotonic()))
        self._is_lasting = False
        why = "unknown: its keeper and the zygote were killed"
        self._on_gone((Survivor(self.pid, "", why),))

    # -- orders to the keeper ---------------------------------------------------------------------
    def term(self, seconds: float) -> None:
        """Order TERM to the leader's group.

        The keeper takes the next rung after `seconds` without an order.
        """
        self._tell(messages.TERM, seconds)

    def term_rest(self, seconds: float) -> None:
        """Order TERM to the rest of the tree.

        The keeper takes the next rung after `seconds` without an order.
        """
        self._tell(messages.REST, seconds)

    def kill(self) -> None:
        """Order the keeper to freeze and kill the whole tree."""
        self._tell(messages.KILL)

    def kill_keeper(self) -> None:
        """Have the zygote kill a keeper that does not answer, and end its tree."""
        if self._zygote is not None and self.keeper_pid is not None:
            # A stopped zygote would not read the request.
            self._zygote.wake()
            with contextlib.suppress(OSError):
                self._zygote.request(messages.encode(messages.KILL_KEEPER, self.keeper_pid))

    def signal(self, number: int, *, to_group: bool) -> None:
        """Order a signal to the child, or to its group."""
        self._tell(messages.SIGNAL, number, to_group)

    def renew(self, seconds: float | None) -> None:
        """Set the time of silence after which the keeper acts alone.

        `seconds`: None: the keeper trusts the host to be alive.
        """
        self._tell(messages.RENEW, seconds)

    def hurry(self, term_at: float, kill_at: float) -> None:
        """Announce that the host ends the tree by these times (`time.monotonic()`).

        Otherwise the keeper does it.
        """
        self._tell(messages.HURRY, term_at, kill_at)

    def note_time(self) -> None:
        """Note the current moment, so that a later `sweep` can refer to it."""
        self._started_since.note()

    def sweep(self, since: float, *, ends: bool) -> None:
        """End the processes of the tree that started since then (`loop.time()`).

        The child and everything that it had started before are spared. `ends`: False only lists the
        processes.

        One `SweepEnded` follows, from the loop, within a bounded time; none if the whole tree ends
        before.
        """
        assert self.pid is not None
        if self._control is not None:
            mark = self._started_since.since(since)
            self._tell(messages.SWEEP, self._sweeps.begin(), mark.tick, mark.pid, ends)

    def _tell(self, *message: Any) -> None:
        if self._control is not None:
            # A keeper that takes no message is dead (the end of its socket follows) or stopped (the
            # last rung of the ladder handles that).
            with contextlib.suppress(OSError):
                syscalls.send(self._control, messages.encode(*message))

    def read_now(self) -> None:
        if self._streams is not None:
            self._streams.read_now()

    def widen_stdout(self) -> None:
        if self._streams is not None:
            self._streams.widen_stdout()

    def resize(self, size: Size) -> None:
        if self._streams is not None:
            self._streams.resize(size)

    def pause_reading(self, stream: Stream | None = None) -> None:
        if self._streams is not None:
            self._streams.pause(stream)

    def resume_reading(self, stream: Stream | None = None) -> None:
        if self._streams is not None and self._hand_over is None:
            self._streams.resume(stream)

    # -- hand-over --------------------------------------------------------------------------------
    def hand_over(
        self, hold_seconds: float, secret: bytes, record: bytes = b""
    ) -> asyncio.Future[str]:
        """Give the child to another host, and return where that host claims it (`adoption.claim`).

        Reading stops now: every byte that was not reported belongs to the successor. When the
        result is there, this object is over, and the death of this host does not end the tree.

        `hold_seconds`: the keeper ends the tree if no host has come after this time. `secret`: the
        successor must present it. `record`: see `hold_record.py`; removed if the future raises.

        Raises `UsageError` for wrong arguments, and `Refused` if the child cannot be handed over
        now. If the future raises, this host still has the child, and reads as before.
        """
        # The import takes milliseconds, and most hosts never hand a child over.
        from banksman.process import hold_record  # noqa: PLC0415
        from banksman.process.tree_hand_over import HandOverRequest, check_hold  # noqa: PLC0415

        check_hold(hold_seconds, secret)
        self._check_hand_over()
        assert self._streams is not None
        assert self._control is not None
        assert self._zygote is not None
        assert self.keeper_pid is not None
        reading = self._streams.reading()
        self._streams.pause()
        self._loop.remove_reader(self._control.fileno())
        done: asyncio.Future[str] = self._loop.create_future()

        def on_answer(answer: str | Exception) -> None:
            request, self._hand_over = self._hand_over, None
            if isinstance(answer, str):
                # The successor has the tree. Nothing here may end it any more.
                self._is_lasting = False
                self.close()
            elif self._control is not None and not self._is_over:
                self._failed_hand_over = request
                self._loop.add_reader(self._control.fileno(), self.hear_now)
                for stream in reading:
                    self.resume_reading(stream)
            if done.done():
                return
            if isinstance(answer, str):
                done.set_result(answer)
            else:
                done.set_exception(answer)

        if self._failed_hand_over is not None:
            self._failed_hand_over.supersede()
        self._hand_over = HandOverRequest(
            self._loop,
            self._control,
            self._zygote,
            self.keeper_pid,
            self._streams.shared,
            on_answer,
            on_named=partial(hold_record.write, record=record) if record else None,
        )
        self._hand_over.begin(hold_seconds, secret)
        return done

    # -- death of this host -----------------------------------------------------------------------
    def survive(self, survival: Survival) -> asyncio.Future[str]:
        """Let the tree survive the death of this host, and return where a successor claims it.

        Once the result is there, the keeper holds the tree if this host is killed, as after a
        hand-over. The tree still ends if this host closes it, or exits as a program does. The child
        must have been started or claimed with spools.

        The keeper then stays after `TreeEnded`, with the output and the exit, until `close`. Call
        that when everything of the child is durable.

        A later call replaces the secret. If the future raises, the tree ends with its host.
        """
        from banksman.process.tree_hand_over import HandOverRequest, check_hold  # noqa: PLC0415

        check_hold(survival.hold_seconds, survival.secret)
        assert self._streams is not None
        assert self._control is not None
        assert self._zygote is not None
        assert self.keeper_pid is not None
        done: asyncio.Future[str] = self._loop.create_future()

        def on_answer(answer: str | Exception) -> None:
            # Only now: the keeper takes the end of its socket for the death of the host, unless it
            # has heard of the later request.
            if former is not None:
                former.retire("a later request replaced this one")
            if not isinstance(answer, str) and self._survival is request:
                self._survival = None
            if not done.done():
                if isinstance(answer, str):
                    done.set_result(answer)
                else:
                    done.set_exception(answer)
                    done.exception()  # Read here, because the caller may not wait: see PipeWrite.
            if survival.on_answered is not None:
                survival.on_answered()

        former = self._survival
        request = self._survival = HandOverRequest(
            self._loop,
            self._control,
            self._zygote,
            self.keeper_pid,
            self._streams.shared,
            on_answer,
            is_lasting=True,
            on_named=survival.on_named,
        )
        self._is_lasting = True
        self._streams.on_closed = partial(self._insist, messages.DROP)
        request.begin(survival.hold_seconds, survival.secret)
        return done

    def forgo(self) -> None:
        """Let the tree end with this host after all, because no successor could continue it."""
        self._insist(messages.FORGO)

    @property
    def is_lasting(self) -> bool:
        """Whether the tree survives the death of this host, or is about to."""
        return self._is_lasting

    def settle(self, stream: Stream, offset: int | None = None) -> None:
        """Note that the bytes of an output before the offset are durable; None: all reported."""
        if self._streams is not None:
            self._streams.settle(stream, offset)

    def _insist(self, *message: Any) -> None:
        """Send a message that the keeper of a tree that survives its host must get."""
        if self._control is None or not self._is_lasting:
            return
        try:
            syscalls.send(self._control, messages.encode(*message))
        except BlockingIOError:
            self._loop.call_later(_RETRY_SECONDS, self._insist, *message)
        except OSError:
            pass  # The keeper is dead, and holds nothing.

    def _check_hand_over(self) -> None:
        # Read what is already there: an exit that this host has heard of is not told again.
        self.hear_now()
        reason = ""
        if self._hand_over is not None:
            reason, hint = "it is being handed over", "wait for the first hand-over"
        elif self._control is None or self._streams is None or self.pid is None:
            reason, hint = "it does not run", "wait for its start"
        elif self._has_exited:
            reason, hint = "it has exited", "wait for the end of its tree"
        elif self._streams.is_writing:
            reason, hint = "a write to its stdin is not finished", "wait for the write"
        elif len(self._sweeps):
            reason, hint = "a sweep of its processes is under way", "wait for the end of the sweep"
        else:
            return
        raise Refused(f"cannot hand over process {self.pid}: {reason}", hint=hint, pid=self.pid)

    # -- end --------------------------------------------------------------------------------------
    def close_output(self) -> None:
        if self._streams is not None:
            self._streams.close_output()

    def close(self) -> None:
        """Close every fd. A keeper that still has a tree ends it: closing the socket is a stop."""
        if self._is_over:
            return
        self._is_over = True
        if self._hand_over is not None:
            self._hand_over.fail(
                Refused(f"cannot hand over process {self.pid}: it was given up", pid=self.pid)
            )
        with spawner.fork_lock:
            self._hang_up()
            if self._streams is not None:
                self._streams.close()

    def let_go(self) -> None:
        """Tell the keeper, from any thread, that no further order follows.

        Its reports are still read.
        """
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                # Only the sending side: the keeper sees the end of the stream and ends its tree,
                # and can still report.
                control.shutdown(_socket.SHUT_WR)

    def abandon(self) -> None:
        """Give up the child after its loop was closed and no event can arrive.

        Closing the socket is a stop, so the keeper ends the tree.
        """
        zygote = self._zygote
        if self._is_lasting:
            self.let_go()
        self.forget()
        spawner.release(self, zygote)

    def forget(self) -> None:
        """Close every fd without touching the loop.

        In a forked child of the program these fds are copies, and the keeper notices nothing.
        """
        self._is_over = True
        self._zygote = None
        if self._streams is not None:
            self._streams.forget()
        if self._control is not None:
            self._control.close()
            self._control = None
        for request in (self._hand_over, self._survival):
            if request is not None:
                request.forget()

    def __del__(self) -> None:
        # The object was collected together with a closed loop. The fds close with their objects,
        # but the zygote must not count this use forever.
        if self._zygote is not None:
            if self._is_lasting:
                self.let_go()
            spawner.drop(self._zygote)

    def _hang_up(self) -> None:
        """Close the control socket and release the zygote."""
        self._sweeps.drop()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            if self._is_lasting:
                self.let_go()
            self._control.close()
            self._control = None
        survival, self._survival = self._survival, None
        if survival is not None:
            # After `let_go`: the keeper takes the end of this socket for the death of the host.
            survival.retire("it has ended")
        spawner.release(self, self._zygote)
        self._zygote = None
