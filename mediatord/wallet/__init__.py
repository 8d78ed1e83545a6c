"""
A small DIDComm v2 wallet for the demo, the tests and the benchmark; no part of the daemon.

:mod:`identity` makes throw-away DIDs, :mod:`packing` reads and writes messages, :mod:`client` speaks to a mediator
over HTTP and :mod:`socket` over a WebSocket. It shares the daemon's pure protocol modules and nothing else, so that
what it sees is what any other client would see.
"""
