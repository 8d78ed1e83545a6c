"""Embedding API: the daemon as a Twisted service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.application.service import IService
from twisted.logger import Logger

from mediatord.config.settings import Config

_log = Logger()


def makeService(
    config: Config,
    reactor: Any = None,
    give_up: Callable[[str], None] = lambda line: _log.critical("{line}", line=line),
) -> IService:
    """
    Build the daemon as one service.

    :param reactor: the global one by default.
    :param give_up: called with one line if the daemon cannot go on after the start; the caller has to stop it then.
    :raise StartupError: keys or identity cannot be used; the text is one line.
    """
    from mediatord.app.daemon import build_daemon

    if reactor is None:
        from twisted.internet import reactor  # noqa: TID251  for embedding, where none is passed
    return build_daemon(reactor, config, give_up=give_up)
