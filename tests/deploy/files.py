"""The files of `deploy/`, and checks of what they contain by the code that they are for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from banksman.config import config_file
from banksman.config.keys import KEYS
from banksman.server.app import ROUTES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VARIABLES = {key.variable for key in KEYS.values()} | {config_file.CONFIG_VARIABLE}
OPEN_PATHS = {route.path for route in ROUTES if route.is_open}


def documents(*path: str) -> list[Any]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(DEPLOY.joinpath(*path).read_text(encoding="utf-8")))


def check_command(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line of Banksman, from its verb on. Exits if it is wrong."""
    verb, *rest = words
    parser: argparse.ArgumentParser = import_module(f"banksman.cli.commands.{verb}").parser()
    return vars(parser.parse_args(rest))


def check_variables(names: Iterable[str]) -> None:
    """Check that each variable of Banksman is one that it reads."""
    unknown = {name for name in names if name.startswith("BANKSMAN_")} - VARIABLES
    assert not unknown


def check_settings(path: Path) -> dict[str, Any]:
    """Return the values of a settings file, by their full names. Raises `UsageError` for an unknown one."""
    return config_file.read(config_file.ConfigFile(path, "--config", is_named=True))
