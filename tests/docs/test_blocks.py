"""Every fenced block of the README and the docs is executed, read by the code that it is for, or listed with a reason.

`HANDLERS` names each block by its page and its beginning. A block without an entry fails the test, and so does an entry
without a block.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.handlers import (
    Handler,
    chat_bot,
    dockerfile,
    editor_entry,
    elsewhere,
    make_from_checkout,
    names,
    profile,
    pytest_command,
    python,
    scrape,
    settings,
    shell,
    socket_unit,
    unit,
    verbs,
    workflow,
)

# All blocks of a page with this language.
WHOLE: dict[tuple[str, str], Handler] = {
    ("docs/cli.md", "text"): elsewhere("tests/cli/test_cli_page.py::test_cli_page_equals_the_help_texts"),
    ("docs/python.md", "python"): elsewhere("tests/test_readme.py::test_python_page_examples_are_all_run"),
    ("docs/tutorial.md", "console"): elsewhere("tests/test_tutorial.py::test_tutorial_shell_blocks_are_all_run"),
    ("docs/tutorial.md", "console second"): elsewhere("tests/test_tutorial.py::test_tutorial_shell_blocks_are_all_run"),
    ("docs/architecture.md", "text"): names,
}
WEB_UI = elsewhere("tests/docs/test_web_ui.py::test_web_ui_page_shows_the_turn_in_a_browser")
HANDLERS: dict[tuple[str, str], Handler] = {
    ("README.md", "pip install"): shell(prints="tested"),
    ("README.md", "make run"): shell(prepare=make_from_checkout, prints="-m pytest"),
    ("README.md", "import asyncio"): elsewhere("tests/test_readme.py::test_readme_example_runs"),
    ("docs/agents.md", "banksman agents"): shell(prints="1.2.3"),
    ("docs/agents.md", "session ="): python(
        is_inside_host=True,
        after='print((await (await session.ask("hello")).outcome()).text)',
        prints="you said: hello\n",
    ),
    ("docs/agents.md", "# ~/.config"): profile,
    ("docs/agents.md", "contained ="): python(is_inside_host=True, prints="hello\n"),
    ("docs/agents.md", "placed ="): python(is_inside_host=True, prints="hello\n"),
    ("docs/agents.md", "limits ="): python(
        after="from banksman.process.attributes import named_limits; print(*named_limits(limits))",
        prints="memory_bytes swap_bytes processes cpus\n",
    ),
    ("docs/architecture.md", "flowchart"): names,
    ("docs/architecture.md", "sequenceDiagram"): names,
    ("docs/architecture.md", "stateDiagram"): elsewhere(
        "tests/core/session/test_turn.py::test_architecture_page_shows_turn_table"
    ),
    ("docs/claude-code.md", "session ="): python(
        is_inside_host=True,
        before="ask_the_person = None",
        script={"prompt": ['boundary {"structured_output":{"cause":"a typo"}}']},
        prints="{'cause': 'a typo'}\n",
    ),
    ("docs/cluster.md", "pip install"): verbs,
    ("docs/cluster.md", "# nats.conf"): elsewhere(
        "tests/cluster/test_cluster_page.py::test_cluster_page_configuration_starts_and_passes_doctor"
    ),
    ("docs/concepts.md", "async with"): python(is_body=True, prints="done\n"),
    ("docs/decisions/0002-zygote-and-keeper.md", "your program"): names,
    ("docs/decisions/0016-hand-over.md", "old host                      keeper"): names,
    ("docs/decisions/0016-hand-over.md", "old host                                     next host"): names,
    ("docs/decisions/0017-crash.md", "host:       step"): names,
    ("docs/editors.md", '{"agent_servers": {"Banksman": {"type"'): editor_entry,
    ("docs/editors.md", '{"agent_servers": {"Banksman": {"command"'): editor_entry,
    ("docs/guarantees.md", ".venv/bin/python"): pytest_command,
    ("docs/how-to/chat-bot.md", "$ python bot.py"): chat_bot,
    ("docs/how-to/chat-bot.md", '"""A chat bot.'): elsewhere("tests/docs/handlers.py::chat_bot"),
    ("docs/how-to/ci.md", "pip install"): shell(prints="tested"),
    ("docs/how-to/ci.md", "name: agent"): workflow,
    ("docs/how-to/ci.md", "import banksman.threads"): python(
        script={"prompt": ['boundary {"structured_output":{"ok":true}}']}
    ),
    ("docs/how-to/drop-ins.md", "import asyncio\nfrom banksman"): python(prints="b'done\\n' ['sleep 1000']\n"),
    ("docs/how-to/drop-ins.md", "# before"): python(
        after="print(*(asyncio.run(each('echo', 'hello')) for each in (run_before, run)))",
        prints="(0, b'hello\\n') (0, b'hello\\n')\n",
    ),
    ("docs/how-to/drop-ins.md", "pip install"): shell(),
    ("docs/how-to/drop-ins.md", "import asyncio\nimport os"): python(prints="you said: Why is CI red?\n0 ()\n"),
    ("docs/how-to/drop-ins.md", "import asyncio\n\nimport banksman"): python(prints="hello\n"),
    ("docs/how-to/drop-ins.md", "options ="): python(
        is_body=True,
        before="import banksman.claude_sdk\nfrom claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient",
        prints="left: ()\n",
    ),
    ("docs/how-to/editor.md", '{"agent_servers"'): editor_entry,
    ("docs/how-to/editor.md", "pip install"): shell(prints="Say hello"),
    ("docs/how-to/editor.md", "request="): shell(prints='"agentCapabilities"'),
    ("docs/how-to/editor.md", "banksman serve"): shell(),
    ("docs/how-to/guard.md", "pip install"): shell(prints="done"),
    ("docs/how-to/guard.md", r"printf '#!/bin/sh\nexec banksman guard --no-hangup -- claude"): shell(),
    ("docs/how-to/guard.md", r"printf '#!/bin/sh\nexec banksman guard --no-hangup -- codex"): shell(),
    ("docs/how-to/guard.md", "from claude_agent_sdk"): python(),
    ("docs/how-to/guard.md", "from acp"): python(),
    ("docs/how-to/guard.md", '{\n  "mcpServers"'): editor_entry,
    ("docs/how-to/guard.md", '{\n  "agent_servers": {\n    "Gemini": {\n'): editor_entry,
    ("docs/how-to/guard.md", '{\n  "agent_servers": {\n    "Gemini": {"'): editor_entry,
    ("docs/how-to/guard.md", "[Service]"): unit,
    ("docs/how-to/provider-errors.md", "import asyncio"): python(
        script={"prompt": ['boundary {"is_error":true,"api_error_status":529,"result":"API Error: 529"}']},
        prints="overloaded (529): ask again later\n",
    ),
    ("docs/how-to/provider-errors.md", "session ="): python(
        is_inside_host=True,
        after='print((await (await session.ask("hello")).outcome()).text)',
        prints="hello\n",
    ),
    ("docs/how-to/provider-errors.md", "nightly ="): python(
        is_inside_host=True,
        after='print((await (await nightly.ask("hello")).outcome()).text)',
        prints="hello\n",
    ),
    ("docs/how-to/provider-errors.md", "async def on_limit"): python(
        is_inside_host=True,
        before="import time",
        script={
            "prompt": [
                'raw {"type":"rate_limit_event","rate_limit_info":{"unifiedWindows":{"five_hour":'
                '{"utilization":1,"resetsAt":4102444800,"status":"rejected"}}}}',
                'boundary {"is_error":true,"api_error":"usage_limit_reached","result":"limited"}',
            ]
        },
        after='print((await (await session.ask("hello")).outcome()).error.kind)',
        prints="usage_limit\n",
    ),
    ("docs/how-to/operator.md", "pip install"): shell(prints="Banksman is at"),
    ("docs/how-to/operator.md", "[serve]"): settings,
    ("docs/how-to/operator.md", "export BANKSMAN_URL"): shell(
        setup=["banksman serve"],
        replace={
            "https://banksman.example.com": "http://127.0.0.1:4380",
            "=… ": "=$(cat ~/.local/state/banksman/token) ",
        },
        prints="no sessions",
    ),
    ("docs/how-to/operator.md", "# prometheus.yml"): scrape,
    ("docs/how-to/operator.md", "umask 077"): shell(setup=["banksman run claude hello"], replace={"/backup/": "~/"}),
    ("docs/how-to/operator.md", "banksman drain"): shell(setup=["banksman serve"], prints="Banksman is at"),
    ("docs/how-to/budgets.md", "import asyncio"): python(prints="11 of 10 tokens (reached)\n1 of 50 turns \n"),
    ("docs/how-to/usage.md", "banksman run"): shell(prints="CALLER"),
    ("docs/how-to/usage.md", "import asyncio"): python(prints="this turn: 11 tokens\nalice 1 10 0.0001\n"),
    ("docs/how-to/proxy.md", "banksman token create"): verbs,
    ("docs/how-to/proxy.md", "[serve]"): settings,
    ("docs/how-to/proxy.md", "banksman.example.com"): elsewhere(
        "tests/deploy/test_proxy.py::test_proxy_gives_each_person_the_rights_of_a_token"
    ),
    ("docs/how-to/traces.md", "[serve]"): settings,
    ("docs/how-to/webhooks.md", "[serve]"): settings,
    ("docs/how-to/webhooks.md", "import hashlib"): elsewhere(
        "tests/server/ops/test_webhooks.py::test_message_is_signed_as_the_page_shows_and_has_no_secret"
    ),
    ("docs/how-to/web-ui.md", "pip install"): WEB_UI,
    ("docs/how-to/web-ui.md", "import os"): WEB_UI,
    ("docs/how-to/web-ui.md", "<!doctype html>"): WEB_UI,
    ("docs/index.md", "pip install"): shell(prints="Why is CI red?"),
    ("docs/migration.md", "# before"): python(
        before="import subprocess", after="import banksman; banksman.shutdown()", prints="0 tested\n\n0 tested\n\n"
    ),
    ("docs/how-to/operator.md", "banksman upgrade"): verbs,
    ("docs/operation.md", "banksman drain --hand-over"): verbs,
    ("docs/systemd.md", "# The port"): socket_unit,
    ("docs/operation.md", '[serve]\nbind = "0.0.0.0"'): settings,
    ("docs/operation.md", "export BANKSMAN_URL"): elsewhere(
        "tests/server/http/test_tls.py::test_verbs_use_https_with_the_ca_of_the_user"
    ),
    ("docs/operation.md", "banksman serve"): shell(prints='{"status":"ok"}'),
    ("docs/reference/configuration.md", "$ BANKSMAN_SERVE_PORT"): shell(),
    ("docs/reference/configuration.md", "store ="): settings,
    ("docs/reference/events.md", "$ banksman log"): shell(setup=['banksman run claude --name demo "Are you there?"']),
    ("docs/reference/metrics.md", "$ token="): shell(setup=["banksman run claude hello", "banksman serve"]),
    ("docs/reference/metrics.md", "# prometheus.yml"): scrape,
    ("docs/performance.md", "make bench"): shell(prepare=make_from_checkout, prints="-m bench"),
    ("docs/scaling.md", "make bench"): shell(prepare=make_from_checkout, prints="-m bench"),
    ("docs/security.md", "banksman doctor"): shell(prints="serve.allow_remote"),
    ("docs/security.md", "banksman token"): shell(prints="alice-*"),
    ("docs/security.md", "[serve]\nhosts"): settings,
    ("docs/server.md", "pip install"): shell(prints="Banksman is at"),
    ("docs/server.md", "url="): elsewhere(
        "tests/server/test_shell_client.py::test_shell_client_prints_every_event_once_when_the_server_is_killed"
    ),
    ("docs/server.md", "curl"): shell(
        setup=["banksman serve", "token=$(cat ~/.local/state/banksman/token)"], prints="Generating"
    ),
    ("docs/server.md", "[serve]\nprograms"): settings,
    ("docs/server.md", "[serve]\nagent_user"): settings,
    ("docs/systemd.md", "[Unit]"): unit,
    ("docs/systemd.md", "[Service]"): unit,
    ("docs/systemd.md", "FROM"): dockerfile,
    ("docs/troubleshooting.md", "banksman doctor"): shell(
        setup=["banksman run claude --name fix-ci hello"], prints="turn.ended"
    ),
    ("docs/troubleshooting.md", "$ banksman ask"): shell(),
    ("docs/troubleshooting.md", "banksman bundle"): shell(
        setup=["banksman run claude --name fix-ci hello"], prints="wrote report.zip"
    ),
}
# Blocks that nothing here can run, each with the reason.
EXEMPT: dict[tuple[str, str], str] = {
    ("docs/how-to/proxy.md", "browser"): "a drawing of three programs",
    ("docs/how-to/proxy.md", "# /etc/oauth2-proxy.cfg"): "needs oauth2-proxy, which Debian does not have; "
    "tests/deploy/test_proxy.py answers in its place",
    ("docs/claude-code.md", "step "): "results of real agents: `make test-agents` prints this table",
    ("docs/cluster.md", "nats stream backup"): "needs the `nats` program, which is not in the locked packages",
    ("docs/how-to/guard.md", "const options"): "needs the TypeScript SDK",
    ("docs/security.md", "agents.example.org"): "needs Caddy and oauth2-proxy",
    ("docs/how-to/guard.md", "from agents"): "needs openai-agents, which is not in the locked packages",
    ("docs/how-to/guard.md", "make guard"): "needs another machine and a container runtime; "
    "tests/guard/test_guard_file.py runs the file",
    ("docs/agents.md", "mkdir"): "moves its shell into another control group",
    ("docs/systemd.md", "docker build"): "needs a container runtime and an image",
}


def entries(block: Block) -> list[tuple[str, str]]:
    """Return the keys of all entries for a block."""
    whole = [(block.page, block.language)] if (block.page, block.language) in WHOLE else []
    starts = [key for key in (*HANDLERS, *EXEMPT) if key[0] == block.page and block.text.startswith(key[1])]
    return [*whole, *starts]


def cases() -> list[Any]:
    """Return a case for each block that is in `HANDLERS`, with the page and the line as its name."""
    return [
        pytest.param(block, HANDLERS[key], id=f"{block.page}:{block.line}")
        for block in blocks()
        for key in entries(block)
        if key in HANDLERS
    ]


def test_every_block_has_one_entry() -> None:
    wrong = [str(block) for block in blocks() if len(entries(block)) != 1]
    assert not wrong, "these blocks have no entry, or several"


def test_every_entry_has_one_block() -> None:
    number = Counter(key for block in blocks() for key in entries(block))
    assert [key for key in (*HANDLERS, *EXEMPT) if number[key] != 1] == []
    assert [key for key in WHOLE if not number[key]] == []


def test_every_fence_is_a_block() -> None:
    for path in {block.page for block in blocks()}:
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        fences = sum(line.lstrip().startswith("```") for line in lines)
        assert fences == 2 * sum(block.page == path for block in blocks()), path


def test_few_blocks_are_exempt() -> None:
    assert len(EXEMPT) < 0.15 * len(blocks())


@pytest.mark.thorough
@pytest.mark.parametrize(("block", "handle"), cases())
def test_block_works_as_the_page_shows(block: Block, handle: Handler, tmp_path: Path) -> None:
    handle(block, tmp_path / "home")


@pytest.mark.thorough
@pytest.mark.parametrize(("key", "handle"), WHOLE.items(), ids=[" ".join(key) for key in WHOLE])
def test_blocks_of_a_page_work_as_it_shows(key: tuple[str, str], handle: Handler, tmp_path: Path) -> None:
    for number, block in enumerate(blocks()):
        if (block.page, block.language) == key:
            handle(block, tmp_path / str(number))
