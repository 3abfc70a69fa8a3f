"""Handlers of the fenced blocks: each runs a block, or reads it by the code that it is for."""

from __future__ import annotations

import configparser
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from tests.docs.blocks import ROOT, SECONDS_MAX, Block, Place, Shell, blocks, commands, coroutine

from banksman.config import config_file
from banksman.config.keys import KEYS
from banksman.sessions import known_agents

# Gets the block and a folder that does not exist yet.
Handler = Callable[[Block, Path], None]
SOURCES = ROOT / "src" / "banksman"


# -- Python ------------------------------------------------------------------------------------------------------------
def python(
    *,
    before: str = "",
    after: str = "",
    is_body: bool = False,
    is_inside_host: bool = False,
    script: Mapping[str, Sequence[str]] | None = None,
    setup: Sequence[str] = (),
    prints: str = "",
) -> Handler:
    """Run the block as a program, or as the body of a coroutine, and compare what it prints.

    `setup`: commands that a shell runs first.
    """

    def handle(block: Block, folder: Path) -> None:
        place = Place(folder, script)
        place.program("my-agent", str(place.bin / "gemini"))
        for name in ("nice", "rmdir"):
            place.program(name, shutil.which(name) or name)
        for words in setup:
            _check_command(shlex.split(words), place)
        code = coroutine(block.text, before=before, after=after, is_inside_host=is_inside_host)
        done = place.python(code if is_body or is_inside_host else f"{before}\n{block.text}\n{after}")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == prints

    return handle


def _check_command(words: list[str], place: Place) -> None:
    done = subprocess.run(
        words, cwd=place.work, env=place.env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr


def chat_bot(block: Block, folder: Path) -> None:
    """Run the bot. A line of the console block with brackets is an answer, another line is typed."""
    program, console = (
        next(each.text for each in blocks() if each.page == block.page and each.language == language)
        for language in ("python", "console")
    )
    command, *lines = console.splitlines()
    assert command == "$ python bot.py"
    typed = [line for line in lines if not line.startswith("[")]
    shown = [line for line in lines if line.startswith("[")]
    answer = shown[0].partition("] ")[2]
    done = Place(folder, {"prompt": [f"say {answer}"]}).python(program, stdin="".join(f"{line}\n" for line in typed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == shown


# -- shell -------------------------------------------------------------------------------------------------------------
def shell(
    *,
    setup: Sequence[str] = (),
    replace: Mapping[str, str] | None = None,
    prints: str = "",
    prepare: Callable[[Place], None] = lambda _: None,
) -> Handler:
    """Type the block into a shell. `console` shows what it prints; for `sh`, the output contains `prints`.

    `setup`: commands before it. `replace`: parts of the block that cannot be the same here; `~` stands for the home.
    """

    def handle(block: Block, folder: Path) -> None:
        place = Place(folder)
        prepare(place)
        text = block.text
        for old, new in (replace or {}).items():
            assert old in text
            text = text.replace(old, new.replace("~", str(folder)))
        with Shell(place) as terminal:
            for command in setup:
                terminal.run(command)
            printed = "".join(map(terminal.run, commands(Block(block.page, block.line, block.language, text))))
        assert prints in printed
        _check_installs(place)

    return handle


def _check_installs(place: Place) -> None:
    """Check that each requirement that pip got exists: an extra of this package, or another package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for verb, *words in place.calls("pip"):
        assert verb == "install"
        for word in words:
            if not word.startswith("-"):
                # A checkout is named by its folder.
                requirement = Requirement(f"banksman{word[1:]}" if word.startswith(".") else word)
                assert requirement.name in ("banksman", "httpx")
                assert requirement.extras <= extras.keys()


FIND_MODULE = """\
import sys
from importlib.util import find_spec
sys.path.insert(0, sys.argv[1])
sys.exit(sys.argv[2] != "-m" or find_spec(sys.argv[3]) is None)
"""


def make_from_checkout(place: Place) -> None:
    """Let `make` print the commands of this checkout's targets, and Python look for the module."""
    found = shutil.which("make")
    assert found is not None
    (place.bin / "make").unlink()
    place.program("make", found, "-n", "-C", str(ROOT))
    (place.work / ".venv-bench" / "bin").mkdir(parents=True)
    (place.work / ".venv-bench/bin/python").symlink_to(place.bin / "find-module")
    place.program("find-module", sys.executable, "-c", FIND_MODULE, str(ROOT))


def verbs(block: Block, folder: Path) -> None:
    """Parse the arguments of each `banksman` command. The extras of pip exist."""
    place = Place(folder)
    found = 0
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["banksman"]:
            import_module(f"banksman.cli.commands.{words[1]}").parser().parse_args(words[2:])
            found += 1
        elif words[:1] == ["pip"]:
            _check_command([str(place.bin / "pip"), *words[1:]], place)
    assert found
    _check_installs(place)


def pytest_command(block: Block, folder: Path) -> None:
    program, *words = shlex.split(block.text)
    assert program == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *words, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout


# -- files -------------------------------------------------------------------------------------------------------------
def settings(block: Block, folder: Path) -> None:
    path = folder / "config.toml"
    path.parent.mkdir()
    path.write_text(block.text, encoding="utf-8")
    assert config_file.read(config_file.ConfigFile(path, "--config", is_named=True))


def profile(block: Block, folder: Path) -> None:
    name = block.text.splitlines()[0].rpartition("/")[2]
    folder.mkdir()
    (folder / name).write_text(block.text, encoding="utf-8")
    found = known_agents.load_file(folder / name)
    assert list(found.command) == tomllib.loads(block.text)["command"]


def editor_entry(block: Block, _: Path) -> None:
    """Parse the command line in the settings of an editor or of an MCP client."""
    ((_, servers),) = json.loads(block.text).items()
    (entry,) = servers.values()
    assert entry["command"] == "banksman"
    verb, *words = entry["args"]
    import_module(f"banksman.cli.commands.{verb}").parser().parse_args(words)


def scrape(block: Block, _: Path) -> None:
    (job,) = yaml.safe_load(block.text)["scrape_configs"]
    assert job.keys() == {"job_name", "authorization", "static_configs"}
    assert job["authorization"].keys() == {"credentials_file"}
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{KEYS['serve.port'].default}"]}]


def workflow(block: Block, folder: Path) -> None:
    """Type the commands of a GitHub job, in the order of its steps and with its variables."""
    (job,) = yaml.safe_load(block.text)["jobs"].values()
    place = Place(folder)
    place.env["XDG_STATE_HOME"] = job["env"]["XDG_STATE_HOME"].replace("${{ github.workspace }}", str(place.work))
    typed: list[str] = []
    with Shell(place) as terminal:
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "run" in step:
                terminal.run(step["run"])
                typed.append(step["run"])
    assert len(typed) == 4
    assert (place.work / ".state/banksman/store.db").is_file()
    events = [json.loads(line) for line in (place.work / "session.ndjson").read_text().splitlines()]
    assert "turn.ended" in [event["kind"] for event in events]
    assert place.calls("npm") == [["install", "-g", "@anthropic-ai/claude-code"]]
    _check_installs(place)


def socket_unit(block: Block, folder: Path) -> None:
    """Check that the unit passes one listening socket to the server."""
    del folder
    parser = configparser.RawConfigParser(strict=True, delimiters=("=",))
    parser.read_string(block.text)
    assert dict(parser["Socket"]) == {"listenstream": "127.0.0.1:4380", "accept": "no", "backlog": "1024"}


def unit(block: Block, folder: Path) -> None:
    """Verify the unit with systemd, if it is installed. The second block replaces lines of the first one."""
    place = Place(folder)
    parser = configparser.RawConfigParser(strict=True, delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    first = next(each for each in blocks() if each.page == block.page and each.language == "ini")
    parser.read_string(first.text)
    if block != first:
        parser.read_string(block.text)
    program, verb, *words = shlex.split(parser["Service"]["ExecStart"])
    assert Path(program).name == "banksman"
    import_module(f"banksman.cli.commands.{verb}").parser().parse_args(words)
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return
    parser["Service"]["ExecStart"] = shlex.join([str(place.bin / "banksman"), verb, *words])
    path = folder / "banksman.service"
    with path.open("w") as file:
        parser.write(file, space_around_delimiters=False)
    # The verifier loads other units of the machine. Only its words about this one count.
    done = subprocess.run(
        [verify, "verify", "--recursive-errors=no", str(path)],
        env={**place.env, "SYSTEMD_LOG_LEVEL": "notice"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert not [line for line in done.stderr.splitlines() if "banksman.service" in line]


def dockerfile(block: Block, folder: Path) -> None:
    place = Place(folder)
    text = re.sub(r"\\\n\s*", "", block.text)
    lines = [line.partition(" ") for line in text.splitlines() if not line.startswith("#")]
    found = {name: words for name, _, words in lines}
    assert [*found] == ["FROM", "RUN", "USER", "ENV", "VOLUME", "ENTRYPOINT", "HEALTHCHECK"]
    program, verb, *words = json.loads(found["ENTRYPOINT"])
    assert program == "banksman"
    import_module(f"banksman.cli.commands.{verb}").parser().parse_args(words)
    # A volume gets the owner of the folder in the image.
    assert f"install -d -o {found['USER']} " in found["RUN"]
    assert found["RUN"].endswith(f" {found['VOLUME']}")
    install, _, _ = found["RUN"].partition(" && ")
    _check_command([str(place.bin / "pip"), *shlex.split(install)[1:]], place)
    _check_installs(place)
    *_, code = json.loads(found["HEALTHCHECK"].removeprefix("CMD "))
    with Shell(place) as terminal:
        terminal.run("banksman serve")
        terminal.run(shlex.join(["python", "-c", code]))


# -- drawings ----------------------------------------------------------------------------------------------------------
@functools.cache
def paths_and_words() -> tuple[frozenset[str], frozenset[str]]:
    """Return the files without suffix and the folders of the package, and each word in its files."""
    paths = list(SOURCES.rglob("*"))
    texts = [path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".js")]
    return (
        frozenset(str(path.relative_to(SOURCES).with_suffix("")) for path in paths),
        frozenset(word for text in texts for word in re.findall(r"\w+", text)),
    )


def names(block: Block, _: Path) -> None:
    """Check that each name of a drawing exists: a file, a folder or a word of the package."""
    paths, words = paths_and_words()
    found = re.findall(r"(?<![\w/.?…])[a-z]+(?:[/_][a-z*_]+)+/?|\b[A-Z][a-z]+[A-Z]\w+", block.text)
    wanted = [name.rstrip("/") for name in found]
    for name in wanted:
        pattern = re.compile("(.*/)?" + r"\w+".join(map(re.escape, name.split("*"))))
        assert name in words or any(map(pattern.fullmatch, paths)), f"the package has no {name}"


# -- others ------------------------------------------------------------------------------------------------------------
def elsewhere(name: str) -> Handler:
    """Check that another test exists, which executes the block or compares it with the code."""

    def handle(_: Block, __: Path) -> None:
        path, function = name.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")

    return handle
