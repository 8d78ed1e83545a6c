"""
Everything that a store keeps, as an archive and back: export and import between backends, backup and restore.

Nothing of this runs in the daemon. It reads and writes stores directly and blocks; the daemon may run beside what
reads, never beside what writes.
"""
