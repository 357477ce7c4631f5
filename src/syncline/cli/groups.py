"""Help with the everyday options first, and the others in named groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows everyday options, and ``--help-all`` all of them.

    Args:
        groups: name of a group -> the names of its parameters; those in none are everyday ones.
        details: follows the epilog where all options are shown.
        others: as for click's own class.
    """

    def __init__(
        self, *, groups: Mapping[str, Sequence[str]], details: str = "", **others: Any
    ) -> None:
        super().__init__(**others)
        self._groups, self._details, self._shown = groups, details, ["Options"]
        shows_all = click.help_option(
            "--help-all", callback=self._show_all, help="Show all options."
        )
        shows_all(self)

    def _show_all(self, context: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked and not context.resilient_parsing:
            whole = copy.copy(self)
            whole._shown = ["Options", *self._groups]
            whole.epilog = f"{self.epilog}\n\n{self._details}"
            click.echo(whole.get_help(context))
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the groups that are shown."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = {str(each.name): each.get_help_record(ctx) for each in options}
        groups = {
            title: [rows.pop(name) for name in names] for title, names in self._groups.items()
        }
        for title, found in {"Options": rows.values(), **groups}.items():
            if title in self._shown:
                with formatter.section(title):
                    formatter.write_dl([row for row in found if row is not None])
