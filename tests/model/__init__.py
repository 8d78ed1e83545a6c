"""The whole mediator on every store, driven by the same random steps and compared with a reference model."""
