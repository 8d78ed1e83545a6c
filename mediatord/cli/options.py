"""Options that several subcommands have, and how they answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mediatord.config_path import DEFAULT_PATH, VARIABLE

LOCAL_URL = "http://127.0.0.1:8080"

_Command = TypeVar("_Command", bound=Callable[..., Any])

_CONFIG = "mediatord.cli.config"


def given_config(context: click.Context) -> Path | None:
    """The configuration that the command line names, wherever in it; None if it names none."""
    path: Path | None = context.meta.get(_CONFIG)
    return path


def _last_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    # Groups are parsed before their commands, so that the last one of the command line counts.
    if path is not None and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
        context.meta[_CONFIG] = path
    return given_config(context) or path


def _config_option(*, default: Path | None = DEFAULT_PATH, **options: Any) -> Callable[[_Command], _Command]:
    return click.option(
        "-c",
        "--config",
        "path",
        metavar="PATH",
        type=click.Path(path_type=Path),
        default=default,
        show_default=True,
        envvar=VARIABLE,
        show_envvar=True,
        callback=_last_config,
        **options,
    )


config_option = _config_option(help="The configuration, mediator.yaml.")
# For a command that writes it: nobody is to fill the directory of the system's daemon by leaving something out.
target_config_option = _config_option(default=None, help="Where to write mediator.yaml.")
# For groups with commands that have it, so that it may stand before them.
group_config_option = _config_option(help="The configuration, for commands that read it.", expose_value=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def url_option(**options: Any) -> Callable[[_Command], _Command]:
    """`--url`, without a slash at its end. :param options: those of :func:`click.option`."""
    return click.option("--url", metavar="URL", callback=_checked_url, **options)


def _checked_url(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    from mediatord.config.values import split_url

    if url is not None and split_url(url) is None:
        raise click.BadParameter("expected an http:// or https:// URL")
    return url and url.rstrip("/")


def _trust(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    # What OpenSSL itself reads, here and in processes that are begun from here.
    if path is not None:
        os.environ["SSL_CERT_FILE"] = str(path.absolute())


ca_option = click.option(
    "--ca",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_trust,
    expose_value=False,
    help="Certificates (PEM) to trust in place of those that the system trusts.",
)


def answer(as_json: bool, value: Any, text: str) -> None:
    """
    Print what a subcommand has to say, on standard output.

    :param value: for programs: one JSON document, on one line.
    :param text: for people.
    """
    click.echo(json.dumps(value, ensure_ascii=False) if as_json else text)
