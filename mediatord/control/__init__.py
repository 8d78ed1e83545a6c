"""Control socket: operator commands to a running daemon over a local UNIX socket."""
