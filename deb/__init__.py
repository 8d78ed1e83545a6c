"""Packages for Debian, and what they and the wheel are built from."""
