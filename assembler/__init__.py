"""The CPU-only service: messages in, token ids out. Imports neither torch nor transformers."""
