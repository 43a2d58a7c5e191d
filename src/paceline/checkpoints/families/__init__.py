"""Families of models, one file each. A file names what its models do differently, as data (`checkpoints.family`):
config keys, GGUF keys, names of tensors, layers, refusals, golden tests. `checkpoints.registry` finds it.
"""
