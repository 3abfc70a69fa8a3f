"""Settings of a server: a misspelt or impossible setting is reported before the server starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from banksman.errors import UsageError
from banksman.server.served_host import store_of
from banksman.server.server_settings import ServerSettings, is_loopback, load


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(written(folder, text), flags)
    return str(caught.value)


def test_settings_without_a_file_are_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load() == ServerSettings()
    assert (ServerSettings().bind, ServerSettings().port, ServerSettings().body_bytes_max) == (
        "127.0.0.1",
        4380,
        32 << 20,
    )
    assert ServerSettings().programs is None
    # The user's own file is read without being named.
    (tmp_path / "banksman").mkdir()
    written(tmp_path / "banksman", "[serve]\nport = 5000\n")
    assert load().port == 5000


def test_settings_flags_override_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path, '[serve]\nport = 5000\nstore = "memory:"\nprograms = ["claude", ["python3", "-m", "agent"]]\n'
    )
    settings = load(path, {"port": 6000, "store": None, "bind": None})
    assert (settings.port, settings.store, settings.bind) == (6000, "memory:", "127.0.0.1")
    assert settings.programs == ["claude", ["python3", "-m", "agent"]]


def test_settings_error_names_the_place_of_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, hint = tmp_path / "config.toml", "(use a whole number, 1 or more, or leave it out)"
    assert refusal(tmp_path, "[serve]\n\nprocesses_max = -1\n") == f"{path}, line 3: processes_max cannot be -1 {hint}"
    assert refusal(tmp_path, "", port=70000).startswith("--port: invalid port 70000 (")
    monkeypatch.setenv("BANKSMAN_SERVE_PROCESSES_MAX", "0")
    assert refusal(tmp_path, "") == f"BANKSMAN_SERVE_PROCESSES_MAX: processes_max cannot be 0 {hint}"


def test_settings_suggest_the_nearest_name_for_an_unknown_one(tmp_path: Path) -> None:
    assert "did you mean 'programs'?" in refusal(tmp_path, "[serve]\nprogram = []\n")
    assert "did you mean 'body_bytes_max'?" in refusal(tmp_path, "[serve]\nbody_byte_max = 1\n")
    assert "did you mean 'roots'?" in refusal(tmp_path, "[serve]\nroot = []\n")
    assert "[server]" in refusal(tmp_path, "[server]\nport = 1\n")


@pytest.mark.parametrize(
    "line",
    [
        *('port = "80"', "port = 1.5", "port = true", "port = -1", "port = 65536", "bind = 1", 'allow_remote = "yes"'),
        *('programs = "claude"', "programs = [1]", 'programs = [["a", 1]]', 'roots = "/"', "env = [1]", "hosts = {}"),
        *(
            "body_bytes_max = 0",
            "body_bytes_max = -1",
            "streams_max = 0",
            "heartbeat_seconds = 0",
            "stall_seconds = -1.0",
        ),
        *(
            "drain_seconds = nan",
            "heartbeat_seconds = inf",
            "keep_bytes = 0",
            "keep_seconds = -1",
            "body_bytes_max = 1e3",
        ),
        *(
            'log_format = "xml"',
            'log_level = "loud"',
            'token = "short"',
            'token = "with a\\nline"',
            'token = "ünïcödé-token"',
        ),
        *(
            'bind = "0.0.0.0"',
            'bind = "::"',
            'bind = "192.168.1.1"',
            'bind = "example.com"',
            'bind = ""',
            'bind = "localhost."',
        ),
    ],
)
def test_settings_refuse_impossible_values(tmp_path: Path, line: str) -> None:
    told = refusal(tmp_path, f"[serve]\n{line}\n")
    assert (
        line.split(maxsplit=1)[0] in told or "other machines can reach it" in told or "token" in told or "port" in told
    )


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        ("nothost", "cannot bind 'nothost': it is not a loopback address (bind 127.0.0.1, "),
        ("", "cannot bind '': it is not a loopback address (bind 127.0.0.1, "),
        ("0.0.0.0", "cannot bind 0.0.0.0: other machines can reach it, "),
        ("::", "cannot bind ::: other machines can reach it, "),
    ],
)
def test_settings_give_the_reason_for_a_refused_address(tmp_path: Path, bind: str, reason: str) -> None:
    assert reason in refusal(tmp_path, f'[serve]\nbind = "{bind}"\n')


def test_settings_never_show_secrets(tmp_path: Path) -> None:
    settings = load(written(tmp_path, '[serve]\ntoken = "visible-secret"\nsecrets = ["other-secret"]\n'))
    assert "secret" not in repr(settings.shown())
    assert "hunter2" not in refusal(tmp_path, '[serve]\ntoken = "hunter2"\n')


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
        ("https://me:hunter2@collector.example.org/hunter2?key=hunter2", "https://collector.example.org"),
        ("http://[::1]:4318/hunter2", "http://[::1]:4318"),
        ("http://[hunter2", "an invalid URL"),
    ],
)
def test_settings_show_the_origin_of_the_collector_only(endpoint: str, shown: str) -> None:
    assert ServerSettings(otel_endpoint=endpoint).shown()["otel_endpoint"] == shown


def test_settings_error_names_the_unreadable_file(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path, "not toml")
    assert "serve cannot be" in refusal(tmp_path, "serve = 1\n")
    with pytest.raises(UsageError, match="it does not exist"):
        load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is not a regular file"):
        load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        load(tmp_path / "bytes.toml")


def test_settings_is_loopback_recognises_local_addresses_only() -> None:
    for bind in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(bind), bind
    for bind in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "LOCALHOST.", "", "127.1", "*", "fe80::1"):
        assert not is_loopback(bind), bind


# -- at the start -----------------------------------------------------------------------------------------------------
def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")},
    )


@pytest.mark.thorough
def test_serve_on_a_public_address_needs_allow_remote(tmp_path: Path) -> None:
    for bind in ("0.0.0.0", "::", "example.com"):
        out, err = (process := start(tmp_path, "--bind", bind)).communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        assert "--allow-remote" in err
    with start(tmp_path, "--bind", "0.0.0.0", "--allow-remote") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Banksman is at http://0.0.0.0:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("store", "whole"),
    [
        (None, "sqlite:?keep_bytes=7&keep_seconds=8"),
        ("sqlite:a", "sqlite:a?keep_bytes=7&keep_seconds=8"),
        ("sqlite:a?b", "sqlite:a?b?keep_bytes=7&keep_seconds=8"),
        ("sqlite:a?level=full", "sqlite:a?level=full&keep_bytes=7&keep_seconds=8"),
        # A setting in the store address precedes the general setting.
        ("sqlite:a?keep_bytes=9", "sqlite:a?keep_bytes=9&keep_seconds=8"),
        ("sqlite:a?keep_seconds=9&keep_bytes=9", "sqlite:a?keep_seconds=9&keep_bytes=9"),
        ("memory:", "memory:"),
    ],
)
def test_settings_retention_is_added_to_the_store_address(store: str | None, whole: str) -> None:
    assert store_of(ServerSettings(store=store, keep_bytes=7, keep_seconds=8)) == whole
