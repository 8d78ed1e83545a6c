"""The way in for those who embed the daemon."""

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
    The whole daemon as one service.

    :param reactor: the global one unless given.
    :param give_up: told in one line why there is no point in going on, should that turn out after the start; the
        service is then to be stopped.
    :raise StartupError: keys or identity cannot be used; the text is one line.
    """
    from mediatord.app.daemon import build_daemon

    if reactor is None:
        from twisted.internet import reactor  # noqa: TID251  for embedding, where there is nobody to pass one
    return build_daemon(reactor, config, give_up=give_up)
