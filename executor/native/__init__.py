"""What torch does too slowly on CPUs: C++ that is compiled on the machine that runs it.

attention.cpp   the attention of a step
parts.py        the work of a step, as that kernel takes it
kernel.py       the compiled kernel, and the proof that it computes what torch does
tiles.cpp       linears of many rows on AMX tiles
tiles.py        the compiled products, and the proof that they are as exact as single precision
operators.py    what a compiled library has
library.py      where a compiled library lies, and how it gets there
compiling.py    the process that compiles it
adoption.py     when an engine gets it
"""
