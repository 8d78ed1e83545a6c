# mypy: ignore-errors
"""
A server on aiohttp: a POST is read and answered with an empty 202, and `/ws` is a WebSocket that only reads.

It writes its versions and its port as JSON. Everything has its default, except that WebSockets are not compressed.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
from aiohttp import web

BACKLOG = 1024


async def accept(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=202)


async def listen(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(compress=False)
    await socket.prepare(request)
    async for _ in socket:
        pass
    return socket


async def main() -> None:
    application = web.Application()
    application.add_routes([web.post("/didcomm", accept), web.get("/ws", listen)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG)
    await site.start()
    (address,) = runner.addresses
    sys.stdout.write(json.dumps({"versions": {"aiohttp": aiohttp.__version__}, "port": address[1]}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
