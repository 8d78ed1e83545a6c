# mypy: ignore-errors
"""
A server of the PyPI package `websockets` whose sockets only read.

It writes its versions and its port as JSON. Everything has its default, except that there is no compression, which
no contender has here, and no pings, for which it needs a task per socket.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

from websockets.asyncio.server import ServerConnection, serve

BACKLOG = 1024


async def listen(connection: ServerConnection) -> None:
    async for _ in connection:
        pass


async def main() -> None:
    options = {"compression": None, "ping_interval": None, "backlog": BACKLOG}
    async with serve(listen, "127.0.0.1", 0, **options) as server:
        port = server.sockets[0].getsockname()[1]
        sys.stdout.write(json.dumps({"versions": {"websockets": version("websockets")}, "port": port}) + "\n")
        sys.stdout.flush()
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
