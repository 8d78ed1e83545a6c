"""The use cases of the DIDComm half, over interfaces only: unpack, route, coordinate, deliver."""
