"""Attention of decoding sequences as machine code: one C++ file, compiled on the machine that runs it.

attention.cpp   the kernel
parts.py        the work of a step, as the kernel takes it
kernel.py       the compiled kernel, and the proof that it computes what torch does
library.py      where the compiled kernel lies, and how it gets there
compiling.py    the process that compiles it
adoption.py     when an engine gets it
"""
