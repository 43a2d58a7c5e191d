"""Families of models, one file each.

A file describes as data (`checkpoints.family`) how its models differ from Llama: config keys, GGUF keys, tensor names,
layers, refusals and golden cases. `checkpoints.registry` finds it.
"""
