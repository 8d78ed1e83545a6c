"""The outside: HTTP resources and the WebSocket protocol."""
