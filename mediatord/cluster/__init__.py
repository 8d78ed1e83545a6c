"""
Several processes on one store that act as one: who is there, who holds which sockets, and hints from one to another.

A hint says that something waits in the store for a DID that the other node has sockets of. It carries ids and no
payload. Whatever becomes of it, the store has the message: a lost hint delays and never loses.
"""
