"""Wire formats of DIDComm v1 (Aries), without I/O."""
