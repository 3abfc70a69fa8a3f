"""Readiness of a server: whether it should get new work, and if not, why.

A check reads flags, makes one lookup in the store and one call of statvfs. It writes nothing.
"""

from __future__ import annotations

import enum
import os

from banksman.runtime.host_stats import has_working_store
from banksman.server.context import Context
from banksman.server.problems import Problem

_ELSEWHERE = "send new work to another server"
_SEE_LOG = "see the server's log; /livez shows whether the server itself answers"


class Unready(enum.Enum):
    """Why a server is not ready. The values are title, detail and hint of the problem."""

    HANDING_OVER = (
        "HandingOver",
        "the server hands its work over to the next server",
        "send new work to the next server",
    )
    DRAINING = ("Draining", "the server is shutting down and accepts no new work", _ELSEWHERE)
    CLUSTER_UNREACHABLE = ("ClusterUnreachable", "the server does not reach its cluster", _SEE_LOG)
    STORE_BROKEN = ("StoreBroken", "cannot read or write the store", _SEE_LOG)
    DISK_NEARLY_FULL = (
        "DiskNearlyFull",
        "the disk of the store is nearly full",
        "free space on it; disk_free_bytes_min is the limit",
    )

    def problem(self) -> Problem:
        title, detail, hint = self.value
        return Problem(503, title, detail, hint=hint)


def find(context: Context) -> Unready | None:
    """Return the first reason why this server is not ready; None if it is ready."""
    if context.is_closing:
        return Unready.HANDING_OVER if context.is_handing_over else Unready.DRAINING
    if context.member is not None and context.member.is_draining:
        return Unready.DRAINING
    if context.proxy is not None and not context.proxy.cluster.hosts.is_held:
        return Unready.CLUSTER_UNREACHABLE
    if not has_working_store(context.host):
        return Unready.STORE_BROKEN
    return Unready.DISK_NEARLY_FULL if _is_nearly_full(context) else None


def _is_nearly_full(context: Context) -> bool:
    folder = context.settings.store_folder
    try:
        disk = None if folder is None else os.statvfs(folder)
    except OSError:
        # A missing folder is a fault of the store, which creates the folder when it is opened.
        return False
    # The blocks that a user without privileges may take.
    return disk is not None and (
        disk.f_bavail * disk.f_frsize < context.settings.disk_free_bytes_min
    )
