"""What was assembled once is kept: in memory, and on disk for other processes and the next start."""
