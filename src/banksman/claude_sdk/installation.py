"""Make the SDK's clients use `ClaudeTransport`: for one client, or for all of this process.

`install` replaces three names of the SDK: the transport class that `query()` uses, and two methods,
`ClaudeSDKClient._connect_inner` and `Query.close`. The class `SubprocessCLITransport` itself stays
as it is. A transport that the caller passes, or that another library has put in place, is used
unchanged.

These names are internal to the SDK. So `install` and `transport` first check the version of the SDK
and everything that they rely on, and refuse an SDK that they do not know.
"""

# The SDK has no public names for these parts. installation.py checks that they are the known ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import logging
import re
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import claude_agent_sdk
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient
from claude_agent_sdk import types as sdk_types
from claude_agent_sdk._internal import client as query_module
from claude_agent_sdk._internal import query as control
from claude_agent_sdk._internal import session_resume
from claude_agent_sdk._internal.transport import subprocess_cli

from banksman.claude_sdk.transport import ClaudeTransport
from banksman.errors import UsageError

log = logging.getLogger("banksman")

# The version that the tests run with. Later ones of the same minor version are accepted with a
# warning if the internals that are used here look the same.
TESTED = (0, 2, 182)
ACCEPTED_SHOWN = "0.2.182 or a later 0.2"

_Original = subprocess_cli.SubprocessCLITransport
# What `install` replaced: the object, the attribute and its value before. Empty: not installed.
_replaced: list[tuple[Any, str, Any]] = []


def transport(options: ClaudeAgentOptions | None = None) -> ClaudeTransport:
    """Return a transport for one client: `ClaudeSDKClient(options, transport=transport(options))`.

    Pass the same options to the client. The SDK applies to a custom transport neither the options
    that become flags of the CLI, nor the permission tool that `can_use_tool` needs; this does.
    With a `session_store`, the SDK resumes no session from it through a custom transport: use
    `install` for that.

    Each client needs its own transport. Raises `UsageError` if the SDK is not a known one.
    """
    _check_sdk()
    return ClaudeTransport(_no_prompt(), _with_permission_tool(options or ClaudeAgentOptions()))


def install() -> None:
    """Make every `ClaudeSDKClient` and `query()` of this process use `ClaudeTransport`.

    Clients that are connected already keep their transport. A second call does nothing. Raises
    `UsageError`, and changes nothing, if the SDK is not a known one.
    """
    if _replaced:
        return
    _check_sdk()
    _replace(query_module, "SubprocessCLITransport", ClaudeTransport)
    _replace(ClaudeSDKClient, "_connect_inner", _connecting(ClaudeSDKClient._connect_inner))
    _replace(control.Query, "close", _closing(control.Query.close))


def uninstall() -> None:
    """Undo `install`. Connected clients keep their transport."""
    while _replaced:
        owner, name, before = _replaced.pop()
        setattr(owner, name, before)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


# -- replaced methods ----------------------------------------------------------------------------
def _connecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def _connect_inner(
        self: ClaudeSDKClient, prompt: Any, actual_prompt: AsyncIterable[dict[str, Any]]
    ) -> None:
        is_replaced = subprocess_cli.SubprocessCLITransport is not _Original
        if self._custom_transport is not None or is_replaced:
            await original(self, prompt, actual_prompt)
            return
        options = _with_permission_tool(self.options)
        if self._materialized is not None:
            options = session_resume.apply_materialized_options(options, self._materialized)
        # Only for this call: the client uses this attribute to choose between its own transport
        # and a custom one, and the choice also disables the session store.
        self._custom_transport = ClaudeTransport(actual_prompt, options)
        try:
            await original(self, prompt, actual_prompt)
        finally:
            self._custom_transport = None

    return _connect_inner


def _closing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def close(self: control.Query) -> None:
        # The original flushes the session store and stops MCP servers before it closes the
        # transport. A raw cancellation that arrives there would leave the CLI alone.
        if isinstance(self.transport, ClaudeTransport):
            self.transport.stop_nowait()
        await original(self)

    return close


def _with_permission_tool(options: ClaudeAgentOptions) -> ClaudeAgentOptions:
    """Let the CLI send its permission requests to `can_use_tool`, if there is one.

    Raises ValueError if the caller has set both, as the SDK does.
    """
    with warnings.catch_warnings():
        # The client calls the same function, and warns then.
        warnings.simplefilter("ignore", claude_agent_sdk.CanUseToolShadowedWarning)
        return sdk_types._configure_can_use_tool(options)


async def _no_prompt() -> AsyncIterator[dict[str, Any]]:
    return
    yield {}


# -- checks --------------------------------------------------------------------------------------
def _check_sdk() -> None:
    """Raise `UsageError` unless the SDK is one that this module knows."""
    version = claude_agent_sdk.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not TESTED <= numbers < (TESTED[0], TESTED[1] + 1):
        raise _unknown(version, "the version was never tested")
    if unknown := _unknown_internals():
        raise _unknown(version, f"its internals differ: {', '.join(unknown)}")
    if numbers != TESTED:
        _warn_untested(version)


@functools.cache
def _warn_untested(version: str) -> None:
    """Warn once for each version."""
    log.warning("claude-agent-sdk %s is untested, logged only once (tested=0.2.182)", version)


def _unknown(version: str, reason: str) -> UsageError:
    return UsageError(
        f"cannot use claude-agent-sdk {version}, only {ACCEPTED_SHOWN}: {reason}",
        hint="install a known version, or run the CLI by `banksman guard` with `cli_path`",
    )


def _unknown_internals() -> list[str]:
    """Return the internals of the SDK that are missing or have another signature."""
    cli = _Original
    expected: list[tuple[str, Any, tuple[str, ...]]] = [
        ("SubprocessCLITransport", cli, ("prompt", "options")),
        ("SubprocessCLITransport.connect", _of(cli, "connect"), ("self",)),
        ("SubprocessCLITransport.close", _of(cli, "close"), ("self",)),
        ("SubprocessCLITransport.write", _of(cli, "write"), ("self", "data")),
        ("SubprocessCLITransport.end_input", _of(cli, "end_input"), ("self",)),
        ("SubprocessCLITransport._handle_stderr", _of(cli, "_handle_stderr"), ("self",)),
        ("_check_claude_version", _of(cli, "_check_claude_version"), ("self", "data")),
        ("_parse_stdout_line", _of(subprocess_cli, "_parse_stdout_line"), ("line",)),
        (
            "_configure_can_use_tool",
            _of(sdk_types, "_configure_can_use_tool"),
            ("options",),
        ),
        (
            "ClaudeSDKClient._connect_inner",
            _of(ClaudeSDKClient, "_connect_inner"),
            ("self", "prompt", "actual_prompt"),
        ),
        ("Query.close", _of(control.Query, "close"), ("self",)),
        (
            "apply_materialized_options",
            _of(session_resume, "apply_materialized_options"),
            ("options", "materialized"),
        ),
    ]
    unknown = [name for name, found, wanted in expected if _parameters(found) != wanted]
    if "open_process" not in cli.connect.__code__.co_names:
        unknown.append("SubprocessCLITransport.connect does not call anyio.open_process")
    made = vars(cli("", ClaudeAgentOptions(cli_path="claude")))
    attributes = (
        *("_process", "_options", "_ready", "_exit_error", "_stderr_task"),
        *("_stdout_stream", "_stdin_stream", "_stderr_stream"),
    )
    unknown += [name for name in attributes if name not in made]
    client = vars(ClaudeSDKClient())
    unknown += [name for name in ("_custom_transport", "_materialized") if name not in client]
    if not hasattr(query_module, "SubprocessCLITransport"):
        unknown.append("SubprocessCLITransport of query()")
    return unknown


def _of(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _parameters(found: Any) -> tuple[str, ...] | None:
    return None if found is None else tuple(inspect.signature(found).parameters)
