"""Help: a few options at first sight, all of them in groups, and NETWORK in one place."""

from __future__ import annotations

import importlib
import re

import click
import pytest

from syncline.cli.commands import COMMANDS
from syncline.cli.networks import NETWORK_HELP
from syncline.plan.network import PRESETS
from tests.cli.examples import Printed

MOST_AT_FIRST_SIGHT = 15


def options_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["train", "simulate"])
def test_few_options_at_first_sight_and_all_in_groups(printed: Printed, name: str) -> None:
    command = getattr(importlib.import_module(f"syncline.cli.{name}"), name)
    known = {p.opts[-1] for p in command.params if isinstance(p, click.Option)} | {"--help"}
    few = options_in(printed(name, "--help"))
    assert len(set(few) - {"--help", "--help-all"}) <= MOST_AT_FIRST_SIGHT
    assert sorted(options_in(printed(name, "--help-all"))) == sorted(known)
    assert options_in(printed(name, "--help")) == few  # asking for all has changed nothing


def test_network_is_explained_in_one_place(printed: Printed) -> None:
    text = printed("help", "network")
    assert all(name in text for name in PRESETS)
    for command in ("plan", "simulate"):
        assert " ".join(NETWORK_HELP.split()) in " ".join(printed(command, "--help").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_on_a_command_is_its_own(printed: Printed, name: str) -> None:
    assert printed("help", name) == printed(name, "--help")
