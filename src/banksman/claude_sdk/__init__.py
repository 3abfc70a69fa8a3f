"""Drop-in for claude-agent-sdk: its clients run the CLI on Banksman's process layer.

    import banksman.claude_sdk
    banksman.claude_sdk.install()      # every ClaudeSDKClient and query() of this process

Afterwards a session of the SDK leaves no process behind, however it ends. `transport(options)` does
the same for one client, without a change to the SDK:

    ClaudeSDKClient(options, transport=banksman.claude_sdk.transport(options))

Needs the extra `banksman[claude-sdk]`.
"""

from __future__ import annotations

try:
    import claude_agent_sdk as _sdk
except ImportError as exc:
    message = (
        "cannot import banksman.claude_sdk: claude-agent-sdk is missing "
        "(run `pip install banksman[claude-sdk]`)"
    )
    raise ImportError(message, name="claude_agent_sdk") from exc

from banksman.claude_sdk.installation import install, transport, uninstall
from banksman.claude_sdk.transport import ClaudeTransport

del _sdk

__all__ = ["ClaudeTransport", "install", "transport", "uninstall"]
