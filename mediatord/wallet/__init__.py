"""
DIDComm v2 and Decentrl wallets for the demo, the tests and the benchmark; not part of the daemon.

They share only the daemon's `protocol` package, so that they see what any other client sees.
"""
