"""What is installed: the wheel, the Debian package, the units of systemd, container and compose file."""
