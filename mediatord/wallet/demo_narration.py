"""How a demonstration is told: numbered steps, and checks that have to hold."""

from __future__ import annotations

import textwrap

import click

# How long a push may take.
PUSH_SECONDS = 10.0

_WIDTH = 96


class Failed(Exception):
    """A step did not end as it must."""


class Narrator:
    """Numbers the steps and prints them."""

    def __init__(self) -> None:
        self._steps = 0

    def chapter(self, title: str) -> None:
        """What the next steps are about."""
        click.echo()
        click.secho(title, bold=True)

    def step(self, text: str, *details: str) -> None:
        """What was done, and what could be seen of it."""
        self._steps += 1
        click.echo(f"  {click.style(f'{self._steps:2}', fg='cyan')}  {text}")
        for detail in details:
            lines = textwrap.wrap(detail, _WIDTH, break_on_hyphens=False) or [""]
            for line in lines:
                click.secho(f"      {line}", dim=True)

    def check(self, text: str, passed: bool) -> None:
        """
        A step that can go wrong.

        :raise Failed: it did.
        """
        mark = click.style("ok", fg="green") if passed else click.style("no", fg="red")
        click.echo(f"      {mark}  {text}")
        if not passed:
            raise Failed(text)


def short(text: str, length: int) -> str:
    """The beginning of something long."""
    return text if len(text) <= length else text[:length] + "..."
