"""Measures what a chat server's callers feel: the loads, the servers they go to, and what is made of the figures."""
