"""CPython's own subprocess tests of asyncio, on the functions of `banksman.asyncio`.

The tests come from the standard library of the running interpreter (`test.test_asyncio.test_subprocess`). The module is
loaded once more, and its name `asyncio` is bound to a copy of asyncio with Banksman's functions. The tests that use
only the public interface must pass. The others are listed with the reason. A test of CPython that is in neither list
fails `test_suite_lists_every_test_of_cpython`.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import importlib.util
import inspect
import sys
import types
import unittest
from typing import Any

import pytest
from tests.thorough import thorough

import banksman.asyncio

# The first Python whose suite has the tests, and the tests.
APPLIES: dict[tuple[int, int], tuple[str, ...]] = {
    (3, 11): (
        "cancel_make_subprocess_transport_exec",
        "cancel_process_wait",
        "communicate",
        "communicate_ignore_broken_pipe",
        "create_subprocess_exec_text_mode_fails",
        "create_subprocess_exec_with_path",
        "create_subprocess_shell_text_mode_fails",
        "devnull_error",
        "devnull_input",
        "devnull_output",
        "devstdin_input",
        "empty_input",
        "kill",
        "kill_issue43884",
        "pause_reading",
        "read_stdout_after_process_exit",
        "send_signal",
        "shell",
        "start_new_session",
        "stdin_broken_pipe",
        "stdin_not_inheritable",
        "stdin_stdout",
        "subprocess_communicate_stdout",
        "terminate",
    ),
    (3, 12): (
        "communicate_none_input",
        "create_subprocess_env_exec",
        "create_subprocess_env_shell",
        "subprocess_concurrent_wait",
    ),
    (3, 13): ("subprocess_send_signal_race",),
}
# These sleep for a second or more.
SLOW = {"kill_issue43884", "read_stdout_after_process_exit", "subprocess_send_signal_race"}
_LOOP = "it calls loop.subprocess_exec, a method of asyncio's loop"
_POPEN = "it replaces subprocess.Popen, which starts no child here"
_BASE = "it tests the class BaseSubprocessTransport, which is not used here"
_WATCHER = "it tests child watchers, which wait for no child here"
DOES_NOT_APPLY = {
    "SubprocessMixin.test_cancel_post_init": _LOOP,
    "SubprocessMixin.test_close_dont_kill_finished": _LOOP,
    "SubprocessMixin.test_close_kill_running": _LOOP,
    "SubprocessMixin.test_subprocess_protocol_events": _LOOP,
    "SubprocessMixin.test_popen_error": _POPEN,
    "SubprocessMixin.test_popen_error_with_stdin_pipe": _POPEN,
    "SubprocessTransportTests.test_proc_exited": _BASE,
    "SubprocessTransportTests.test_subprocess_repr": _BASE,
    "GenericWatcherTests.test_create_subprocess_fails_with_inactive_watcher": _WATCHER,
    "GenericWatcherTests.test_create_subprocess_with_pidfd": _WATCHER,
    "MultiLoopChildWatcherTests.test_warns": _WATCHER,
}

NAMES = [name for since, names in APPLIES.items() if sys.version_info >= since for name in names]


def with_banksman(module: types.ModuleType, **others: Any) -> types.ModuleType:
    """Return a copy of a module with Banksman's functions in it."""
    copy = types.ModuleType(module.__name__)
    drop_in = {name: getattr(banksman.asyncio, name) for name in banksman.asyncio.__all__ if hasattr(module, name)}
    vars(copy).update(vars(module) | drop_in | others)
    return copy


def load_suite() -> Any:
    """Load CPython's test module with the copies in place of asyncio."""
    spec = importlib.util.find_spec("test.test_asyncio.test_subprocess")
    assert spec is not None, "this Python has no test package; install it, or use another Python"
    assert spec.loader is not None
    suite: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    suite.subprocess = with_banksman(asyncio.subprocess)
    suite.asyncio = with_banksman(asyncio, subprocess=suite.subprocess)
    return suite


SUITE = load_suite()


class Case(SUITE.SubprocessMixin, SUITE.test_utils.TestCase):
    """The mixin of CPython's tests with a loop that ends as in `asyncio.run`, and without a child watcher."""

    __test__ = False  # The tests below run it.

    def setUp(self) -> None:
        super().setUp()  # pyright: ignore[reportUnknownMemberType]
        self.loop = asyncio.new_event_loop()
        self.set_event_loop(self.loop)
        self.addCleanup(self.end_loop)

    def end_loop(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())


def test_suite_lists_every_test_of_cpython() -> None:
    found = {
        getattr(kind, name).__qualname__
        for _, kind in inspect.getmembers(SUITE, inspect.isclass)
        if issubclass(kind, unittest.TestCase)
        for name in unittest.TestLoader().getTestCaseNames(kind)
    }
    listed = {f"SubprocessMixin.test_{name}" for name in NAMES}
    assert listed <= found
    assert not listed & DOES_NOT_APPLY.keys()
    assert found - listed <= DOES_NOT_APPLY.keys()


def test_suite_calls_the_functions_of_banksman() -> None:
    for namespace in (SUITE.asyncio, SUITE.subprocess):
        assert namespace.create_subprocess_exec is banksman.asyncio.create_subprocess_exec
        assert namespace.create_subprocess_shell is banksman.asyncio.create_subprocess_shell


@pytest.mark.parametrize("name", [pytest.param(name, marks=thorough if name in SLOW else ()) for name in NAMES])
def test_cpython_test_passes(name: str) -> None:
    result = unittest.TestResult()
    Case(f"test_{name}").run(result)
    assert (result.testsRun, result.skipped) == (1, [])
    assert [text for _test, text in (*result.errors, *result.failures)] == []
