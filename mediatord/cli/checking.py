"""`mediatord check-config`."""

from __future__ import annotations

from pathlib import Path

import click

from mediatord.cli.options import config_option, json_option


@click.command("check-config")
@config_option
@json_option
def check_config(path: Path, as_json: bool) -> int:
    """
    Say what is wrong with a configuration, one line each.

    The files that it names are looked at as well, as the user who types this: keys, certificates, the database,
    directories. Nothing is changed and nobody is connected to. Exits with 2 if the configuration cannot be used, with
    1 if only what it names is not right.
    """
    from mediatord.cli.surroundings import look_around
    from mediatord.config.file import Problem, examine

    draft = examine(path)
    around: list[Problem] = []
    if draft.config is not None:
        # What is said of a default that stands in for a mistake would be about nothing that anybody wrote.
        found = [(where, text) for where, text in look_around(draft.config, path) if not draft.is_wrong(where)]
        around = [draft.problem(where, text) for where, text in found]
    lines = draft.lines(around)
    if as_json:
        _tell(path, lines)
    else:
        for line in lines:
            click.echo(line, err=True)
        if not lines:
            click.echo(f"{path}: ok")
    return 2 if draft.problems else 1 if around else 0


def _tell(path: Path, lines: list[str]) -> None:
    from mediatord.cli.options import answer

    answer(True, {"file": str(path), "ok": not lines, "problems": lines}, "")
