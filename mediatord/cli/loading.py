"""Subcommands that are imported when they are asked for, as most of them need what takes a second to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

import click


class Loading(MutableMapping[str, click.Command]):
    """
    Commands by name, each imported when it is first looked up.

    :param places: `module:variable` of each.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module, _, variable = self._places[name].partition(":")
            self._loaded[name] = getattr(import_module(module), variable)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._places.setdefault(name, "")
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def loaded(self, name: str) -> click.Command | None:
        """The command if that needs no import."""
        return self._loaded.get(name)


class LoadingGroup(click.Group):
    """
    Lists its subcommands without importing them.

    :param catalogue: by name `module:variable` and the short help, which is empty for what is not listed.
    """

    def __init__(self, name: str | None = None, *, catalogue: Mapping[str, tuple[str, str]], **options: Any) -> None:
        loading = Loading({name: place for name, (place, _) in catalogue.items()})
        super().__init__(name, commands=loading, **options)
        self._loading = loading
        self.short_helps = {name: text for name, (_, text) in catalogue.items()}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does it, but for the imports."""
        names = [name for name in self.list_commands(ctx) if self._is_listed(name)]
        limit = formatter.width - 6 - max(len(name) for name in names)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name, limit)) for name in names])

    def _is_listed(self, name: str) -> bool:
        command = self._loading.loaded(name)
        return bool(self.short_helps.get(name)) if command is None else not command.hidden

    def _short_help(self, name: str, limit: int) -> str:
        known = self.short_helps.get(name)
        return known or self._loading[name].get_short_help_str(limit)
