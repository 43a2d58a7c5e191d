"""Decoder layers and matrix products in C++, compiled on the machine they run on."""
