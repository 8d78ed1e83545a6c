"""Types of command-line options, whose errors and help say `integer` and `number`."""

from __future__ import annotations

import click


class IntegerRange(click.IntRange):
    """An integer within bounds."""

    name = "integer"


class NumberRange(click.FloatRange):
    """A number within bounds."""

    name = "number"
