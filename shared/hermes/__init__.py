"""What callers of Hermes import: the generated contract (`hermes.v1`), a client and the command line."""
