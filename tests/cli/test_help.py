"""Help: a few options at first sight, all of them in groups, and NETWORK in one place."""

from __future__ import annotations

import importlib
import re

import click
import pytest
from click.testing import CliRunner

from syncline.cli.commands import COMMANDS, cli
from syncline.cli.networks import NETWORK_HELP
from syncline.plan.network import PRESETS

MOST_AT_FIRST_SIGHT = 15


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def options_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["train", "simulate"])
def test_few_options_at_first_sight_and_all_of_them_in_groups(name: str) -> None:
    command = getattr(importlib.import_module(f"syncline.cli.{name}"), name)
    known = {p.opts[-1] for p in command.params if isinstance(p, click.Option)} | {"--help"}
    few = options_in(helped(name, "--help"))
    assert len(set(few) - {"--help", "--help-all"}) <= MOST_AT_FIRST_SIGHT
    every = options_in(helped(name, "--help-all"))
    assert sorted(every) == sorted(known)
    assert options_in(helped(name, "--help")) == few  # asking for all has changed nothing


def test_network_is_explained_in_one_place() -> None:
    text = helped("help", "network")
    assert all(name in text for name in PRESETS)
    for command in ("plan", "simulate"):
        assert " ".join(NETWORK_HELP.split()) in " ".join(helped(command, "--help").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_on_a_command_is_its_own(name: str) -> None:
    assert helped("help", name) == helped(name, "--help")


def test_help_on_an_unknown_command() -> None:
    result = CliRunner().invoke(cli, ["help", "trian"])
    assert result.exit_code == 2
    assert "did you mean 'train'?" in result.output
