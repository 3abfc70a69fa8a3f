"""Environment and arguments that make each real agent use the fake model; tests/agents checks them with real agents."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from banksman.testing.fake_model import FakeModel
from banksman.testing.fake_model.setups import SETUPS


@pytest.fixture
def fake() -> Iterator[FakeModel]:
    with FakeModel() as running:
        yield running


@pytest.mark.parametrize("agent", SETUPS)
def test_env_is_complete_and_names_only_the_fake_model(fake: FakeModel, agent: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = fake.env(home, agent)
    assert environment["HOME"] == str(home)
    assert environment["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    temporary = Path(environment["TMPDIR"])
    assert temporary.is_dir()
    assert temporary.is_relative_to(home)
    files = [path for path in home.rglob("*") if path.is_file()]
    told = " ".join([*environment.values(), *fake.args(agent), *(path.read_text() for path in files)])
    addresses = set(re.findall(r"https?://[\w.:-]+", told))
    assert addresses == {fake.url}
    # The agent also gets an API key, in a variable or in a file.
    keys = [value for name, value in environment.items() if "KEY" in name]
    assert keys or "fake-key" in told


def test_codex_is_configured_on_its_command_line(fake: FakeModel, tmp_path: Path) -> None:
    for agent in ("codex", "codex-acp"):
        flags, settings = fake.args(agent)[::2], fake.args(agent)[1::2]
        assert set(flags) == {"-c"}
        told = tomllib.loads("\n".join(settings))
        provider = told["model_providers"][told["model_provider"]]
        assert (provider["base_url"], provider["wire_api"]) == (f"{fake.url}/v1", "responses")
        environment = fake.env(tmp_path, agent)
        assert environment[provider["env_key"]]
        # Codex refuses a home that does not exist.
        assert Path(environment["CODEX_HOME"]).is_dir()


def test_claude_and_opencode_need_no_arguments(fake: FakeModel) -> None:
    assert fake.args() == fake.args("claude") == fake.args("opencode") == []


def test_settings_file_is_written_only_when_it_differs(fake: FakeModel, tmp_path: Path) -> None:
    fake.env(tmp_path, "opencode")
    path = tmp_path / ".config/opencode/opencode.json"
    settings = json.loads(path.read_text())
    assert settings["provider"]["fake"]["options"]["baseURL"] == f"{fake.url}/v1"
    # The file is not writable now, and need not be written.
    path.chmod(0o400)
    before = path.stat()
    fake.env(tmp_path, "opencode")
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    path.chmod(0o600)
    with FakeModel() as other:
        other.env(tmp_path, "opencode")
        assert f"{other.url}/v1" in path.read_text()


def test_settings_file_written_by_the_agent_is_kept(fake: FakeModel, tmp_path: Path) -> None:
    fake.env(tmp_path, "codex")
    own = tmp_path / ".codex/config.toml"
    own.write_text('trust_level = "trusted"')
    fake.env(tmp_path, "codex")
    assert own.read_text() == 'trust_level = "trusted"'


def test_unknown_agent_is_refused_by_name(fake: FakeModel, tmp_path: Path) -> None:
    for ask in (lambda: fake.env(tmp_path, "nobody"), lambda: fake.args("nobody")):
        with pytest.raises(ValueError, match=r"'nobody'.* known are claude, codex"):
            ask()
    assert not list(tmp_path.iterdir())
