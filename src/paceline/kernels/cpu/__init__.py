"""Decoder layers and matrix multiplications in C++, compiled on the machine they run on."""
