"""Builds push notifications: the configured services, the registry of devices, and what schedules and sends wake-ups."""

from __future__ import annotations
