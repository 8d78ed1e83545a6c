"""
The console script `mediatord-analytics`, also `python -m analytics` and what `spark-submit` is given.

Exit status: 0 fine, 1 failed, 2 wrong usage, 3 no input for these days, 4 done but the integrity of the logs is
broken, 143 and 130 after SIGTERM and SIGINT. Every error is one line on standard error, but for the one about Java.
Spark is imported once there is a Java to run it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from analytics.commands import COMMANDS
from analytics.errors import FAILED, WRONG_USAGE, AnalyticsError, reason
from analytics.java import JavaNotFound
from analytics.stop import STOP, Stopped
from mediatord import __version__

_PROGRAM = "mediatord-analytics"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=_PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    """What a mediator's logs tell: tables, a report and figures for alerts, made every night by Spark."""


for command in COMMANDS:
    cli.add_command(command)


def main(given: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit. :param given: without the name of the program; by default those it was given."""
    sys.exit(_status_of(sys.argv[1:] if given is None else list(given)))


def _status_of(given: list[str]) -> int:
    debug = "--debug" in given
    # What libraries say by the way, some of them about every call that a signal cut short.
    logging.basicConfig(handlers=[logging.StreamHandler() if debug else logging.NullHandler()])
    try:
        with STOP.listening():
            status = cli.main(given, prog_name=_PROGRAM, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG_USAGE
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except Stopped as stopped:
        return _complain(str(stopped), stopped.exit_status)
    except Exception as error:
        return _failed(error, debug)


def _failed(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, JavaNotFound):
        click.echo(f"{_PROGRAM}: {error}", err=True)
        return error.exit_status
    if isinstance(error, AnalyticsError):
        return _complain(str(error), error.exit_status)
    if isinstance(error, OSError) and error.filename:
        return _complain(f"{error.filename}: {error.strerror}", FAILED)
    return _complain(f"{type(error).__name__}: {reason(error)}", FAILED)


def _complain(text: str, status: int) -> int:
    click.echo(f"{_PROGRAM}: {' '.join(text.split())}", err=True)
    return status
