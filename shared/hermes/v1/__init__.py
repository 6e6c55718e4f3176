"""The contract, generated from protos/hermes/v1 by `make proto`."""
