"""Credo from npm, a library of wallets that speak DIDComm v1, run by Node; and its own mediator."""
