"""A server takes over what the last one left before it imports anything of HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT
from tests.server.kit import SECONDS_MAX

from banksman.server import served_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a hand-over needs Linux")

HTTP = {"starlette", "uvicorn", "h11", "banksman.server.app", "banksman.server.http_service", "banksman.server.context"}
START = "import sys; from banksman.cli import main; sys.exit(main(sys.argv[1:]))"


def environment(folder: Path) -> Mapping[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}


def run(code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(folder),
        input="{}",
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_server_module_imports_nothing_of_http(tmp_path: Path) -> None:
    code = "import sys, json, banksman.server.main; print(json.dumps([*sys.modules]))"
    found = json.loads(run(code, folder=tmp_path).stdout)
    assert "banksman.server.served_host" in found
    assert HTTP.isdisjoint(found)


def test_server_takes_over_before_it_imports_the_application(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from banksman.server.ops import server_hand_over\n"
        "async def take(host, settings):\n"
        f"    print(sorted({HTTP!r}.intersection(sys.modules)), flush=True)\n"
        f"server_hand_over.take = take\n{START}"
    )
    store = f"sqlite:{tmp_path}/store.db"
    words = [sys.executable, "-c", code, "serve", "--port", "0", "--store", store]
    with subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "[]\n"
            assert "Banksman is at http://" in server.stdout.readline()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS_MAX) == 0


@pytest.mark.parametrize("package", served_host.PACKAGES)
def test_missing_package_ends_the_start_before_the_store_is_opened(package: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; {START}"
    done = run(code, "serve", "--port", "0", "--store", f"sqlite:{tmp_path}/store.db", folder=tmp_path)
    assert done.returncode == 2
    assert f"the package {package} is not installed (pip install 'banksman[server]')" in done.stderr
    assert not (tmp_path / "store.db").exists()


def test_packages_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split("[<>=]", one)[0] for one in project["optional-dependencies"]["server"]]
    assert {name.replace("-", "_") for name in names} == {*served_host.PACKAGES}


def test_missing_telemetry_ends_the_start_before_the_store_is_opened(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['opentelemetry'] = None; {START}"
    words = ("serve", "--port", "0", "--store", f"sqlite:{tmp_path}/store.db")
    code = f"import os; os.environ['BANKSMAN_SERVE_OTEL_ENDPOINT'] = 'http://127.0.0.1:1'; {code}"
    done = run(code, *words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "OpenTelemetry is not installed (pip install 'banksman[otel]'" in done.stderr
    assert not (tmp_path / "store.db").exists()


def test_check_of_a_version_imports_what_it_needs_after_the_take_over(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['click'] = None; {START}"
    done = run(code, "serve", "--check", "--store", f"sqlite:{tmp_path}/store.db", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("import of click halted; None in sys.modules\n")
