"""Keys and values: the pool of blocks, the prefix tree over it, and the sequences that read and write them."""
