"""Hosts of one tree: watch the present one, and give the tree to the next one.

A tree gets another host in two ways:
- **A hand-over.** The host wants to leave. It sends the fds that a successor needs, and the keeper
  holds the tree from then on (`HeldTree`), until a successor claims it or the host changes its
  mind.
- **A crash.** The host sent the same fds when the tree was started (SURVIVE). The keeper holds the
  tree when that host dies. It keeps copies of the fds, so the tree survives the next host as well.

The keeper has both ends of the control socket then. So its messages wait there, and the end of the
socket means that no host is left. But in the second way it does not mean that while the host lives:
the keeper's own copy keeps the socket open. Therefore such a host ends in one of these ways:
- It says so, by shutting the control socket down. The tree ends with it, as always.
- It dies: its pidfd is readable.
- It closes everything without a word, or replaces itself by exec(). The *lifeline* ends then, a
  socket of which the host has the only other end.

The output that a killed host has read may not be durable. So the keeper repeats its reports for the
successor, and drops those that are still unread.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.hold import HeldTree, close_all
from banksman.process.keeper.lease_timer import LeaseTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from banksman.process.keeper.outbox import KeeperOutbox

    # Leader, started_at, grace, linger and has_terminal.
    Tree = tuple[int, float, float, float, bool]


class Offer:
    """Offer to a successor: fds, their names, and where and by which secret it claims them.

    `order`: the parts of HAND_OVER or SURVIVE. `fds`: a listening socket, those of
    `messages.HOST_FDS`, and the open streams. The offer owns them.
    """

    def __init__(self, order: tuple[Any, ...], fds: list[int]) -> None:
        self.seconds, self.secret, self.path, self.streams = order
        self.fds = fds

    def copy(self) -> Offer:
        """Return the same offer with copies of the fds. OSError: there is no room for them."""
        copies: list[int] = []
        try:
            # Each copy is in the list as soon as it exists.
            copies.extend(map(syscalls.dup, self.fds))
        except OSError:
            close_all(copies)
            raise
        return Offer((self.seconds, self.secret, None, self.streams), copies)

    def drop(self, name: str) -> None:
        """Close one stream, which its host has closed."""
        opened = [stream for stream, is_open in self.streams if is_open]
        if name in opened:
            at = 1 + len(messages.HOST_FDS) + opened.index(name)
            syscalls.close(self.fds.pop(at))
            # A successor hears of the end of an output. An input is just not there.
            self.streams = tuple(
                (stream, is_open and stream != name)
                for stream, is_open in self.streams
                if stream != name or name != "stdin"
            )

    def close(self) -> None:
        """Withdraw the offer."""
        close_all(self.fds)
        try:
            syscalls.unlink(self.path)
        except OSError:
            pass  # It is gone already, or the next hand-over of this user removes it.


class Succession:
    """The host of a tree, and its successors.

    `host`: a pidfd of the host, registered with the poller; -1 once no host can come any more.
    """

    __slots__ = (
        *(
            "_control",
            "_hold",
            "_is_watching",
            "_lifeline",
            "_offer",
            "_outbox",
            "_poller",
            "_tree",
        ),
        "host",
    )

    def __init__(
        self, poller: select.poll, control: int, host: int, outbox: KeeperOutbox, tree: Tree
    ) -> None:
        self.host = host
        self._poller = poller
        self._control = control
        self._outbox = outbox
        self._tree = tree
        # Set while the tree waits for another host.
        self._hold: HeldTree | None = None
        # Set if the tree survives its host.
        self._offer: Offer | None = None
        self._lifeline: _socket.socket | None = None
        # Whether the poller has the host and the lifeline. Not during a hold.
        self._is_watching = True

    @property
    def is_open(self) -> bool:
        """Whether the keeper has to stay for a host, even if the tree is gone."""
        return self._hold is not None or self._offer is not None

    def is_host_gone(self, ready: dict[int, int]) -> bool:
        """Whether the host has died, or has closed everything without a word."""
        if self._lifeline is not None and self._lifeline.fileno() in ready:
            return True
        return self.host in ready

    def due(self) -> float | None:
        """Return when a hold needs attention at the latest."""
        return None if self._hold is None else self._hold.due()

    # -- orders of the host -----------------------------------------------------------------------
    def hold(self, order: tuple[Any, ...], fds: list[int], *, is_stopping: bool) -> None:
        """Hold the tree for another host, and acknowledge it: from then on this host may leave."""
        self.end_hold(b"over")
        answer = self._acknowledge(order, fds, is_stopping=is_stopping)
        if answer is not None:
            answer.close()
            self._begin_hold(Offer(order, fds), is_lasting=False)

    def survive(self, order: tuple[Any, ...], fds: list[int], *, is_stopping: bool) -> None:
        """Be ready to hold the tree if the host dies, and acknowledge it."""
        # A host that hands the tree over has no say in what happens after it.
        is_late = is_stopping or self._hold is not None
        answer = self._acknowledge(order, fds, is_stopping=is_late)
        if answer is not None:
            self.forgo()
            self._offer = Offer(order, fds)
            self._lifeline = answer
            self._poller.register(answer.fileno(), select.POLLIN)

    def _acknowledge(
        self, order: tuple[Any, ...], fds: list[int], *, is_stopping: bool
    ) -> _socket.socket | None:
        """Answer the host, and return the socket of the answer. None: the host stays the host."""
        if not fds:
            return None  # Not even the socket for the answer has arrived.
        answer = _socket.socket(fileno=fds.pop(0))
        streams: tuple[tuple[str, bool], ...] = order[3]
        refusal = "stop" if is_stopping else ""
        # The listener, the host's fds, and the streams.
        if len(fds) != 1 + len(messages.HOST_FDS) + sum(is_open for _name, is_open in streams):
            refusal = "fds"
        word = (messages.REFUSED, refusal) if refusal else (messages.HELD,)
        try:
            syscalls.send(answer, messages.encode(*word))
        except OSError:
            # The host has given up waiting, or is dead. It stays the host, dead or alive.
            refusal = "answer"
        if refusal:
            close_all(fds)
            answer.close()
            return None
        return answer

    def drop(self, name: str) -> None:
        """Close the copy of a stream that the host has closed: the child must see the end of it."""
        if self._offer is not None:
            self._offer.drop(name)

    def forgo(self) -> None:
        """Let the tree end with its host, as trees usually do."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.close()
        self._cut_lifeline()

    # -- holds ------------------------------------------------------------------------------------
    def hold_after_death(self) -> bool:
        """Hold the tree of a host that has died. False: this tree ends with its host."""
        if self._offer is None or self._hold is not None:
            return False
        try:
            offer = self._offer.copy()
        except OSError:
            self.forgo()
            return False
        # The order of `messages.HOST_FDS`, after the listener.
        _drain(offer.fds[1])
        self._outbox.repeat()
        self._begin_hold(offer, is_lasting=True)
        self._cut_lifeline()
        return True

    def _begin_hold(self, offer: Offer, *, is_lasting: bool) -> None:
        leader, *times, has_terminal = self._tree
        guards = (os.getpid(), os.getppid())
        state = (leader, *guards, *times, has_terminal, is_lasting, offer.streams)
        listener, *fds = offer.fds
        until = time.monotonic() + offer.seconds
        self._hold = HeldTree(self._poller, listener, offer.path, offer.secret, (state, fds), until)
        # The fds stay open: `end_hold` watches this host again.
        self._poller.unregister(self.host)
        if self._lifeline is not None:
            self._poller.unregister(self._lifeline.fileno())
        self._is_watching = False

    def look_for_successor(self, ready: dict[int, int], lease: LeaseTimer) -> LeaseTimer:
        """Give the tree to the first successor that claims it, or end the hold in time.

        Return the lease that is in force then.
        """
        hold = self._hold
        if hold is None:
            return lease
        for client, fds in hold.claims(ready):
            # The hold ends with the first claim that succeeds. Later ones find it ended.
            theirs = None if self._hold is None else self._give(hold, client, fds, lease)
            lease = theirs or lease
            close_all(fds)
        if self._hold is not None and time.monotonic() >= hold.until:
            self.end_hold(b"over")
        return lease

    def _give(
        self, hold: HeldTree, client: _socket.socket, fds: list[int], lease: LeaseTimer
    ) -> LeaseTimer | None:
        """Make the client the host of the tree, and return its lease.

        None: it is not the host, and the hold continues. `fds`: a pidfd of the successor, and
        perhaps its lease page.
        """
        try:
            theirs = lease if len(fds) == 1 else LeaseTimer(fds[1], lease)
        except (OSError, ValueError, AssertionError):
            hold.refuse(client, b"lease")
            return None
        if not hold.give(client):
            return None
        self._hold = None
        hold.close(b"taken")
        if not hold.is_lasting:
            # The successor has taken everything, and may ask for the same with its own secret.
            self.forgo()
        syscalls.close(self.host)
        self.host = fds.pop(0)
        self._watch()
        return theirs

    def end_hold(self, why: bytes) -> None:
        """Return the tree to the host that wanted to hand it over, or that has died.

        If that host has left, its end of the control socket closes with the hold. The keeper then
        finds that the host is gone, and ends the tree.
        """
        hold, self._hold = self._hold, None
        if hold is None:
            return
        hold.close(why)
        if hold.is_lasting:
            self.forgo()
        self._watch()

    def end(self) -> bool:
        """Give up waiting for any host. False if that was done before."""
        self.forgo()
        if self.host == -1:
            return False
        # Both fds stay readable from now on, so poll() would spin. They are unregistered only once,
        # because the poller raises for an unknown fd.
        self._poller.unregister(self.host)
        self._poller.unregister(self._control)
        self.host = -1
        self._outbox.stop_polling()
        return True

    def _watch(self) -> None:
        """Watch the host again, after a hold."""
        self._is_watching = True
        self._poller.register(self.host, select.POLLIN)
        if self._lifeline is not None:
            self._poller.register(self._lifeline.fileno(), select.POLLIN)

    def _cut_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            if self._is_watching:
                self._poller.unregister(lifeline.fileno())
            lifeline.close()


def _drain(control: int) -> None:
    """Drop the messages that a dead host has not read."""
    host_end = _socket.socket(fileno=control)
    try:
        while syscalls.recv(host_end):
            pass
    except OSError:
        pass  # Nothing is left.
    finally:
        host_end.detach()
