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
    return next((reason for reason in Unready if _holds(reason, context)), None)


def reasons(context: Context) -> dict[str, bool]:
    """Return whether each condition holds that makes a server unready, by its name for metrics."""
    return {reason.name.lower(): _holds(reason, context) for reason in Unready}


def _holds(reason: Unready, context: Context) -> bool:
    match reason:
        case Unready.HANDING_OVER:
            return context.is_closing and context.is_handing_over
        case Unready.DRAINING:
            is_leaving = context.member is not None and context.member.is_draining
            return is_leaving or (context.is_closing and not context.is_handing_over)
        case Unready.CLUSTER_UNREACHABLE:
            return context.proxy is not None and not context.proxy.cluster.hosts.is_held
        case Unready.STORE_BROKEN:
            return not has_working_store(context.host)
        case Unready.DISK_NEARLY_FULL:
            return _is_nearly_full(context)


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
