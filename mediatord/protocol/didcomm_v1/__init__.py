"""DIDComm v1 (Aries): envelopes, messages, and the protocols that a mediator speaks with the wallets of today."""
