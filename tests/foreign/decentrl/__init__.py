"""The published Decentrl client, `@decentrl/event-store`, run by Node."""
