"""The whole mediator on every store, driven by the same random steps and held to a model of what comes of them."""
