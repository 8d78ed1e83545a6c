"""The DIDComm use cases: unpack, route, coordinate mediation, deliver."""
