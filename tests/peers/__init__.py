"""mediatord beside other software: libraries, a mediator, listeners (docs/explanation/performance.md)."""
