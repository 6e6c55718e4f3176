"""The service that owns the model, the prefix KV tree and decoding."""
