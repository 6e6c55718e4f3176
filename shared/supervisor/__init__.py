"""Runs both services on one machine: one supervisor a run directory, which stops both when one ends."""
