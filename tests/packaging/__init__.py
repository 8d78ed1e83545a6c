"""Packages and deployment files: wheel, Debian package, systemd units, container and compose files."""
