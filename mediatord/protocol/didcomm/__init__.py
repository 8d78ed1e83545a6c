"""DIDComm Messaging v2: envelopes, messages, DIDs and the protocols a mediator speaks."""
