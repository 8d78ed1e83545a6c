"""A store-and-forward mediator for DIDComm v2 and Decentrl wallets."""

__version__ = "0.1.0"
