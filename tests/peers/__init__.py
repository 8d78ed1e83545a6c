"""mediatord side by side with what is installable by name: libraries, a mediator, listeners (docs/peers.md)."""
