"""
Several processes on one store: membership, presence of sockets, and notifications between nodes.

A notification names items in the store that are for sockets of another node. It carries ids and no payload; a lost
one delays a delivery and never loses it.
"""
