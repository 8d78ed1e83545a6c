"""Decentrl on the wire: canonical JSON, DIDs, signatures, contracts, commands."""
