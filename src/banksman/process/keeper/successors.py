"""Channels of the zygote to the hosts of trees that were handed over.

A zygote belongs to the host that started it. A tree that this host hands over (`hold.py`) keeps its
keeper and its zygote, and gets another host. The old host usually exits then, and the zygote stays
for the tree. It has the same duties as before, so it must know the new host:
- The new host may ask it to kill a keeper that does not answer.
- After the death of the new host, the zygote bounds the time that the keeper takes.

The old host makes a *channel* for each hand-over. One end goes to the zygote, the other one to the
successor, by way of the keeper. A successor may hand the tree over again, with another channel.
"""

from __future__ import annotations

import _socket
import select

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.hold import close_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class KeeperOwner(Protocol):
        """The zygote, as far as a channel needs it. Keepers are named by their pids."""

        def kill_keeper(self, pid: int) -> None: ...
        def bound(self, pid: int, seconds: float) -> None: ...
        def unbound(self, pid: int) -> None: ...


class Channel:
    """Socket to one host, and the pid of the keeper. `host`: its pidfd, -1 until it comes.

    `seconds`: the tree survives the hosts of this channel. After the death of one it is held for
    this time, and the next host comes by the same channel.
    """

    def __init__(self, sock: _socket.socket, keeper: int, seconds: float | None = None) -> None:
        self.sock = sock
        self.keeper = keeper
        self.host = -1
        self.seconds = seconds


class Successors:
    """The channels of all keepers that were handed over or are being handed over.

    A keeper has up to two channels: to its host, and to the host that is expected. Until that host
    comes, the first one may still cancel (KEEP).
    """

    def __init__(self, poller: select.poll, guard: KeeperOwner) -> None:
        self._poller = poller
        self._guard = guard
        self._hosts: dict[int, Channel] = {}
        self._expected: dict[int, Channel] = {}
        # Channels of trees that survive their hosts.
        self._lasting: dict[int, Channel] = {}
        # The same channels, by the fds that the poller watches.
        self._watched: dict[int, Channel] = {}

    def __contains__(self, keeper: int) -> bool:
        """Whether the tree of this keeper was handed over, or is held for a successor."""
        return keeper in self._hosts or keeper in self._expected

    def expect(self, keeper: int, channel: int, seconds: float) -> None:
        """Expect another host for the tree of this keeper, within `seconds`."""
        self.keep(keeper)
        expected = self._expected[keeper] = Channel(_socket.socket(fileno=channel), keeper)
        self._watch(channel, expected)
        # The keeper ends the tree if no host comes. This bounds a keeper that cannot.
        self._guard.bound(keeper, seconds)

    def survive(self, keeper: int, channel: int, seconds: float) -> None:
        """Expect another host for the tree of this keeper, within `seconds` after its host's death.

        Nothing is bounded until then.
        """
        former = self._lasting.pop(keeper, None)
        # The channel of the present host stays.
        if former is not None and former is not self._hosts.get(keeper):
            self._close(former)
        lasting = Channel(_socket.socket(fileno=channel), keeper, seconds)
        self._lasting[keeper] = lasting
        self._watch(channel, lasting)

    def hold_seconds(self, keeper: int) -> float:
        """Return how long this keeper holds its tree after the death of its host."""
        lasting = self._lasting.get(keeper)
        return 0.0 if lasting is None or lasting.seconds is None else lasting.seconds

    def keep(self, keeper: int) -> None:
        """Forget the expected host: the present one has cancelled the hand-over."""
        channel = self._expected.pop(keeper, None)
        if channel is not None:
            self._close(channel)
            self._guard.unbound(keeper)

    def on_ready(self, ready: dict[int, int]) -> None:
        """Handle the messages and the deaths of these hosts."""
        # Looked up before the first is handled: that may close fds, and their numbers may be used
        # again at once.
        found = [(fd, self._watched[fd]) for fd in ready if fd in self._watched]
        for fd, channel in found:
            if self._watched.get(fd) is not channel:
                continue
            # The messages before the death: the last one may say that the tree was handed over.
            is_over = self._hear(channel)
            if is_over or fd == channel.host:
                self._on_gone(channel, is_over=is_over)

    def end(self, keeper: int) -> list[_socket.socket]:
        """Forget a keeper that has ended, and return its open channels.

        Their hosts take the closing of a channel as the proof that nothing of the tree is left, so
        the caller closes them when that is true.
        """
        tables = (self._hosts, self._expected, self._lasting)
        # The channel of a host may be in two tables.
        channels = {table.pop(keeper) for table in tables if keeper in table}
        return [self._unwatch(channel) for channel in channels]

    def _hear(self, channel: Channel) -> bool:
        """Carry out the messages that wait. True: no further message can come."""
        while True:
            try:
                data, fds = syscalls.recv_fds(channel.sock)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._obey(channel, messages.decode(data), fds)

    def _obey(self, channel: Channel, message: tuple[Any, ...], fds: list[int]) -> None:
        match message:
            case (messages.ADOPT, _keeper) if len(fds) == 1:
                self._adopt(channel, fds.pop())
            case (messages.KILL_KEEPER, _keeper):
                self._guard.kill_keeper(channel.keeper)
            case (messages.HAND_OVER, _keeper, seconds) if len(fds) == 1:
                self.expect(channel.keeper, fds.pop(), seconds)
            case (messages.KEEP, _keeper):
                self.keep(channel.keeper)
            case (messages.SURVIVE, _keeper, seconds) if len(fds) == 1:
                self.survive(channel.keeper, fds.pop(), seconds)
            case _:
                # The fds had no room. The zygote guards other trees too, so this is no reason to
                # end.
                pass
        close_all(fds)

    def _adopt(self, channel: Channel, host: int) -> None:
        """Take the process of this pidfd as the host of the tree."""
        keeper = channel.keeper
        if channel not in (self._expected.get(keeper), self._lasting.get(keeper)):
            syscalls.close(host)
            return
        # The successor of a hand-over has all. Channels of other hosts are of no use any more.
        tables = (self._hosts, self._expected, self._lasting)
        if channel is self._lasting.get(keeper):
            tables = tables[:2]
        for other in {table.pop(keeper) for table in tables if keeper in table} - {channel}:
            self._close(other)
        self._forget_host(channel)
        self._hosts[keeper] = channel
        channel.host = host
        self._watch(host, channel)
        self._guard.unbound(keeper)

    def _on_gone(self, channel: Channel, *, is_over: bool) -> None:
        """Bound the time of a keeper whose host is gone, or whose successor has not come.

        The socket stays open: `end` closes it after the tree, which a host may wait for.

        `is_over`: no process has the other end of the channel.
        """
        keeper = channel.keeper
        if channel is self._lasting.get(keeper):
            if not is_over:
                # The host has died. The keeper has the other end, for the next host.
                self._forget_host(channel)
                self._guard.bound(keeper, self.hold_seconds(keeper))
                return
            del self._lasting[keeper]
            if channel is not self._hosts.get(keeper):
                # The tree does not survive its host any more.
                self._close(channel)
                return
        is_host = self._hosts.get(keeper) is channel
        if is_host and keeper in self._expected:
            # A host that has handed the tree over may leave, and does not wait for the tree.
            del self._hosts[keeper]
            self._close(channel)
            return
        self._unwatch(channel)
        # A tree may survive this host by another channel than its own.
        self._guard.bound(keeper, self.hold_seconds(keeper) if is_host else 0.0)

    def _watch(self, fd: int, channel: Channel) -> None:
        self._watched[fd] = channel
        self._poller.register(fd, select.POLLIN)

    def _unwatch(self, channel: Channel) -> _socket.socket:
        self._forget_host(channel)
        self._unwatch_fd(channel.sock.fileno())
        return channel.sock

    def _forget_host(self, channel: Channel) -> None:
        if channel.host >= 0:
            self._unwatch_fd(channel.host)
            syscalls.close(channel.host)
            channel.host = -1

    def _unwatch_fd(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _close(self, channel: Channel) -> None:
        self._unwatch(channel).close()
