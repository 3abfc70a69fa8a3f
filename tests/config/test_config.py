"""Settings: four layers with one precedence, errors that name the place, and secrets that are never shown."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banksman import config
from banksman.config.config_file import as_toml, template
from banksman.config.config_key import ValueKind
from banksman.config.keys import KEYS, TABLES
from banksman.errors import UsageError
from banksman.server.server_settings import ServerSettings


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the developer's settings file and variables."""
    for name in [name for name in os.environ if name.startswith("BANKSMAN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "banksman").mkdir()
    return tmp_path


def written(home: Path, text: str) -> Path:
    path = home / "banksman" / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def run(*words: str, verb: str = "config", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "banksman", verb, *words],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **env},
    )


# -- the list of keys ------------------------------------------------------------------------------------------------
def test_config_keys_of_serve_match_the_server_settings() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(ServerSettings)}
    keys = {key.short: key for key in KEYS.values() if key.table == "serve"}
    assert fields.keys() == keys.keys()
    for name, field in fields.items():
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        assert keys[name].default == default, name
        assert keys[name].is_secret == (name in ("token", "secrets", "webhooks")), name


def test_config_keys_all_have_a_description_and_a_default() -> None:
    for name, key in KEYS.items():
        assert key.what.endswith("."), name
        assert (key.default is None) == bool(key.usual), f"{name}: a default, or words for what holds without one"
        assert key.table in ("", *TABLES), name


# -- the layers ------------------------------------------------------------------------------------------------------
def test_config_flag_precedes_variable_file_and_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def port(**flags: Any) -> tuple[int, str]:
        found = config.load(flags={f"serve.{name}": value for name, value in flags.items()})["serve.port"]
        return found.value, found.origin

    assert port() == (4380, "default")
    path = written(home, "[serve]\nport = 1\n")
    assert port() == (1, str(path))
    monkeypatch.setenv("BANKSMAN_SERVE_PORT", "2")
    assert port() == (2, "BANKSMAN_SERVE_PORT")
    assert port(port=3) == (3, "--port")
    # A flag that was not given, or an empty variable, sets nothing.
    assert port(port=None) == (2, "BANKSMAN_SERVE_PORT")
    monkeypatch.setenv("BANKSMAN_SERVE_PORT", "")
    assert port() == (1, str(path))


def test_config_file_is_chosen_by_flag_then_variable_then_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = home / "one.toml", home / "two.toml"
    one.write_text('agent = "one"\n')
    two.write_text('agent = "two"\n')
    written(home, 'agent = "users"\n')
    assert config.load().value("agent") == "users"
    monkeypatch.setenv("BANKSMAN_CONFIG", str(one))
    assert config.load().value("agent") == "one"
    assert config.load(path=two).value("agent") == "two"
    monkeypatch.setenv("BANKSMAN_CONFIG", str(home / "none.toml"))
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: it does not exist .*BANKSMAN_CONFIG"):
        config.load()


def test_config_serve_store_falls_back_to_the_users_store(home: Path) -> None:
    path = written(home, 'store = "memory:"\n')
    found = config.load()["serve.store"]
    assert (found.value, found.origin) == ("memory:", str(path))
    written(home, 'store = "memory:"\n[serve]\nstore = "sqlite:/x"\n')
    assert config.load().value("serve.store") == "sqlite:/x"
    assert config.load().value("store") == "memory:"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("serve.allow_remote", word, True) for word in ("1", "true", "Yes", "on")),
        *(("serve.allow_remote", word, False) for word in ("0", "false", "no", "OFF")),
        ("serve.hosts", "a.example, b.example", ["a.example", "b.example"]),
        ("serve.hosts", '["a.example"]', ["a.example"]),
        ("serve.programs", '["claude", ["python3", "-m", "agent"]]', ["claude", ["python3", "-m", "agent"]]),
        ("serve.heartbeat_seconds", "2", 2.0),
        ("serve.keep_bytes", "1000", 1000),
        ("store", "memory:", "memory:"),
    ],
)
def test_config_variable_is_parsed_by_the_type_of_its_key(
    name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS[name].variable, text)
    found = config.load().value(name)
    assert (found, type(found)) == (value, type(value))


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ('sotre = "memory:"', 1, "unknown key 'sotre' (did you mean 'store'?)"),
        ("[serve]\n\nprot = 1", 3, "unknown key 'serve.prot' (did you mean 'port'?)"),
        ('[run]\n# priority\nprioritty = "x"', 3, "unknown key 'run.prioritty' (did you mean 'priority'?)"),
        ("[serv]\nport = 1", 1, "unknown table [serv] (did you mean [serve]?)"),
        ("port = 1", 1, "unknown key 'port' (did you mean 'port' in [serve]?)"),
        ('[serve]\nagent = "x"', 2, "(did you mean 'agent' before the first table?)"),
        ("store = 1", 1, "store cannot be 1 (use a string)"),
        ('[serve]\nport = "80"', 2, "serve.port cannot be '80' (use a whole number)"),
        ('format = "xml"', 1, "format cannot be 'xml' (use one of: text, json, quiet)"),
        ("[serve]\nhosts = [1]", 2, "serve.hosts cannot be [1] (use a list of strings)"),
        ("[serve]\nstall_seconds = inf", 2, "serve.stall_seconds cannot be inf (use a number)"),
        pytest.param(f"[serve]\nstall_seconds = {10**400}", 2, "serve.stall_seconds cannot be 1000", id="huge"),
        ("run = 1", 1, "run cannot be 1 (use a table: [run])"),
        ("[serve]\nallow_remote = 1", 2, "serve.allow_remote cannot be 1 (use true or false)"),
        ("[nope]\nport = 1", 1, "unknown table [nope] (use [serve] or [run])"),
        ("nope = 1", 1, "unknown key 'nope' (see docs/reference/configuration.md for all keys)"),
        ('token = "hunter2hunter2"', 1, "cannot set token in a file (set BANKSMAN_TOKEN instead"),
    ],
)
def test_config_file_error_names_its_line(home: Path, text: str, line: int, told: str) -> None:
    path = written(home, f"{text}\n")
    with pytest.raises(UsageError) as caught:
        config.load()
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert told in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_config_number_too_long_to_parse_is_not_toml(home: Path) -> None:
    path = written(home, f"[serve]\nport = {'9' * 5000}\n")
    with pytest.raises(UsageError, match=rf"^{path} is not TOML: "):
        config.load()


def test_config_number_too_long_to_print_is_reported_without_it(home: Path) -> None:
    path = written(home, f"store = 0x{'f' * 5000}\n")
    with pytest.raises(UsageError, match=rf"^{path}, line 1: store cannot be a number with so many digits"):
        config.load()


def test_config_load_of_usual_settings_does_not_import_msgspec(home: Path) -> None:
    """Every import adds to the start time of a verb."""
    written(home, 'store = "memory:"\n[serve]\nport = 1\nallow_remote = false\n')
    code = "import sys; from banksman import config; config.load(); sys.exit('msgspec' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BANKSMAN_SERVE_PORT", "eighty"),
        ("BANKSMAN_SERVE_ALLOW_REMOTE", "perhaps"),
        ("BANKSMAN_SERVE_DRAIN_SECONDS", "nan"),
        ("BANKSMAN_SERVE_PROGRAMS", "[1"),
        pytest.param("BANKSMAN_SERVE_PROGRAMS", "[" * 5000, id="nested"),
        pytest.param("BANKSMAN_SERVE_PROGRAMS", f"[{'1' * 5000}]", id="digits"),
        ("BANKSMAN_FORMAT", "xml"),
    ],
)
def test_config_variable_error_names_the_variable(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"^{name}: "):
        config.load()


def test_config_unknown_variable_is_mentioned_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKSMAN_SERVE_PROT", "1")
    config.load()
    monkeypatch.setenv("BANKSMAN_CWD", "/of/a/hook")
    assert config.strays() == [config.UnknownVariable("BANKSMAN_SERVE_PROT", "BANKSMAN_SERVE_PORT")]
    done = run("show", "serve.port")
    assert (done.returncode, done.stderr) == (
        0,
        "banksman: unknown variable BANKSMAN_SERVE_PROT; did you mean BANKSMAN_SERVE_PORT?\n",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BANKSMAN_PORT", "did you mean BANKSMAN_SERVE_PORT?"),
        ("BANKSMAN_STROE", "did you mean BANKSMAN_STORE?"),
        ("BANKSMAN_ON_QUESTION", "did you mean BANKSMAN_RUN_ON_QUESTION?"),
        ("BANKSMAN_CONFIGS", "did you mean BANKSMAN_CONFIG?"),
        ("BANKSMAN_NOPE", "see docs/reference/configuration.md for all keys"),
    ],
)
def test_config_unknown_variable_gets_a_hint_only_for_a_similar_name(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert [stray.hint for stray in config.strays() if stray.name == name] == [hint]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("port", "did you mean 'serve.port'?"), ("nope", "run `banksman config show` for all keys")],
)
def test_config_unknown_key_gets_a_hint_only_for_a_similar_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.known(name)
    assert caught.value.hint == hint


def test_config_show_never_shows_a_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(home, '[serve]\ntoken = "hunter2hunter2"\nsecrets = ["hunter2-other"]\n')
    monkeypatch.setenv("BANKSMAN_TOKEN", "hunter2-mine")
    monkeypatch.setenv("BANKSMAN_URL", "http://127.0.0.1:1/#token=hunter2-printed")
    for words in (["show"], ["show", "--json"], ["show", "--format", "quiet"], ["show", "token"]):
        done = run(*words)
        assert done.returncode == 0
        assert "hunter2" not in done.stdout + done.stderr
    shown = json.loads(run("show", "--json").stdout)["settings"]
    assert {shown[name]["value"] for name in ("token", "serve.token", "serve.secrets")} == {"set"}
    assert shown["token"]["origin"] == "BANKSMAN_TOKEN"
    assert "hunter2" not in repr(list(config.load()))
    # A secret is hidden in an error, too.
    written(home, "[serve]\ntoken = 12345678\n")
    done = run("show")
    assert done.returncode == 2
    assert "12345678" not in done.stderr


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:hunter2@host:1/?token=hunter2", "http://…@host:1/"),
        ("http://host:1/p?hunter2", "http://host:1/p"),
        ("http://host:1/#token=hunter2@x", "http://host:1/"),
        # The end of the password is ambiguous in these.
        ("http://me:hunter/2@host", "http://…"),
        ("http://me:hunter#2@host", "http://…"),
        ("me:hunter2@host", "…@host"),
        ("unix:/a@b/x.sock", "unix:/a@b/x.sock"),
        ("http://host:1/p", "http://host:1/p"),
    ],
)
def test_config_show_hides_secrets_in_a_url(monkeypatch: pytest.MonkeyPatch, value: str, shown: str) -> None:
    monkeypatch.setenv("BANKSMAN_URL", value)
    assert config.load()["url"].shown == shown


def test_config_show_hides_secrets_in_a_store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKSMAN_STORE", "nats://me:hunter2@host/x")
    assert [config.load()[name].shown for name in ("store", "serve.store")] == ["nats://…@host/x"] * 2
    monkeypatch.setenv("BANKSMAN_STORE", "sqlite:/a@b#c?level=full")
    assert config.load()["store"].shown == "sqlite:/a@b#c?level=full"


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_config_path_that_is_no_file_is_an_error_at_once(home: Path, kind: str) -> None:
    path = home / "banksman" / "config.toml"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    done = run("show")
    assert (done.returncode, done.stderr) == (
        2,
        f"banksman: cannot read {path}: it is not a regular file (pass the path of a regular file)\n",
    )


def test_acp_with_wrong_settings_fails_in_one_line(home: Path) -> None:
    path = written(home, "[serve]\nprot = 1\n")
    done = run(verb="acp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"banksman acp: {path}, line 2: unknown key 'serve.prot' (did you mean 'port'?)\n"


# -- the template ----------------------------------------------------------------------------------------------------
def test_config_template_changes_nothing_and_its_values_are_valid() -> None:
    text = template()
    assert all(not values for values in tomllib.loads(text).values())
    # Without the `#` before each key, every value is valid for its key.
    lines = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in text.splitlines()]
    data = tomllib.loads("\n".join(lines))
    flat = {name: value for name, value in data.items() if name not in TABLES}
    for table in TABLES:
        flat |= {f"{table}.{name}": value for name, value in data[table].items()}
    assert flat.keys() == {key.name for key in KEYS.values() if key.is_in_file}
    for name, value in flat.items():
        key = KEYS[name]
        assert value == (key.default if key.example is None else key.example), name
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    "value", ["a", 'with "quotes" and \\', "ümläut\x7f\n\x00", 1, 1.5, True, ["a", ["b", "c"]], []]
)
def test_config_as_toml_round_trips_values(value: object) -> None:
    assert tomllib.loads(f"x = {as_toml(value)}") == {"x": value}


def test_config_init_writes_a_private_file_and_overwrites_nothing(home: Path) -> None:
    path = home / "new" / "deep" / "config.toml"
    done = run("init", "--config", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text() == template()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# mine\n")
    done = run("init", "--config", str(path))
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert path.read_text() == "# mine\n"
    assert run("init", "--force", "--config", str(path)).returncode == 0
    assert path.read_text() == template()
    assert os.listdir(path.parent) == ["config.toml"], "nothing is left beside it"
    done = run("init", "--config", str(path / "below"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_config_init_and_path_work_with_a_malformed_file(home: Path) -> None:
    path = written(home, "not toml")
    assert run("show").returncode == 2
    assert run("path").stdout == f"{path}\n"
    assert run("init", "--force").returncode == 0
    assert run("show").returncode == 0


# -- show ------------------------------------------------------------------------------------------------------------
def test_config_show_prints_key_value_and_origin(home: Path) -> None:
    path = written(home, '[serve]\nport = 5000\nprograms = ["claude", ["a", "b"]]\n')
    done = run("show", BANKSMAN_AGENT="codex")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows.keys() == {"KEY", *KEYS}
    assert rows["serve.port"].split() == ["serve.port", "5000", str(path)]
    assert '["claude", ["a", "b"]]' in rows["serve.programs"]
    assert rows["agent"].split() == ["agent", '"codex"', "BANKSMAN_AGENT"]
    assert "(store.db in the state folder)" in rows["store"]
    assert run("show", "agent", "--format", "quiet").stdout == "claude\n"
    done = run("show", "serve.prot")
    assert (done.returncode, done.stderr) == (2, "banksman: unknown key 'serve.prot' (did you mean 'serve.port'?)\n")


def test_config_format_applies_to_every_verb(home: Path) -> None:
    written(home, 'format = "json"\n')
    assert json.loads(run("path").stdout)["file"].endswith("config.toml")
    # A flag has precedence.
    assert run("path", "--format", "text").stdout.startswith("/")
    done = run(verb="agents")
    assert "agents" in json.loads(done.stdout)
    # A verb that cannot read its format reports the error.
    written(home, 'fromat = "json"\n')
    done = run(verb="agents")
    assert done.returncode == 2
    assert "did you mean 'format'?" in done.stderr


def test_config_value_kinds_are_all_in_use() -> None:
    assert {key.kind for key in KEYS.values()} == set(ValueKind)
