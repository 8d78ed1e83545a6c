"""
A small Decentrl wallet for the demo, the tests and the benchmark; no part of the daemon.

:mod:`identity` makes throw-away identities, :mod:`commands` what they say to a mediator, :mod:`contracts` and
:mod:`envelopes` what they say to each other; :mod:`client`, :mod:`contracting` and :mod:`wallet` speak HTTP and
:mod:`socket` the WebSocket. It shares the daemon's pure protocol modules and nothing else, so that what it sees is
what any other client would see.
"""
