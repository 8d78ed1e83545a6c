"""The pure half: bytes and values in, values out; no reactor, no clock, no I/O."""
