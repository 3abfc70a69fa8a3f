"""tools/typescript.py installs the packages once, and reports a failed install loudly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.thorough import thorough

pytestmark = thorough

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools" / "typescript.py"


def run(cache: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the tool without a registry: nothing listens on that port."""
    without = {name: value for name, value in os.environ.items() if name != "CI"}
    npm = {"npm_config_registry": "http://127.0.0.1:9/", "npm_config_fetch_retries": "0"}
    return subprocess.run(
        [sys.executable, *(words or (str(TOOL),))],
        cwd=TOOL.parent,
        env={**without, **npm, "npm_config_cache": str(cache / "npm"), "XDG_CACHE_HOME": str(cache), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_typescript_tool_finds_installed_packages_until_a_file_is_gone(tmp_path: Path) -> None:
    folder = Path(run(tmp_path, "-c", "import typescript; print(typescript.folder())").stdout.strip())
    assert folder.is_relative_to(tmp_path)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}", encoding="utf-8")
    (folder / ".stamp.json").write_text(json.dumps({"package.json": 2}), encoding="utf-8")
    found = run(tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{folder}\n", "")
    (folder / "package.json").unlink()
    is_whole = run(tmp_path, "-c", "import typescript; print(typescript.is_whole(typescript.folder()))")
    assert is_whole.stdout == "False\n"


@thorough
@pytest.mark.parametrize(("env", "code"), [({}, 0), ({"CI": "true"}, 1)])
def test_typescript_tool_warns_of_failed_install(tmp_path: Path, env: dict[str, str], code: int) -> None:
    done = run(tmp_path, **env)
    assert (done.returncode, done.stdout) == (code, "")
    assert "NO TYPESCRIPT" in done.stderr


def test_typescript_lock_has_a_hash_for_each_package_and_no_address() -> None:
    text = (ROOT / "requirements" / "typescript" / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in text
    packages = json.loads(text)["packages"]
    del packages[""]
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
