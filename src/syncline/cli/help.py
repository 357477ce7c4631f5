"""``syncline help``: what a command or a topic is about."""

from __future__ import annotations

from pathlib import Path

import click

from syncline.cli.commands import cli


@click.command()
@click.argument("topic")
@click.pass_context
def help(context: click.Context, /, topic: str) -> None:  # noqa: A001 - the command's name
    """Explain TOPIC: a command, or 'network' for what NETWORK may be."""
    if topic == "network":
        click.echo(Path(__file__).with_name("network.txt").read_text(), nl=False)
    elif command := cli.get_command(context.find_root(), topic):
        click.echo(command.get_help(click.Context(command, info_name=topic, parent=context.parent)))
