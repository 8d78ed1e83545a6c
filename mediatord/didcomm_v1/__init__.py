"""DIDComm v1 (Aries) use cases."""
