"""The families of models. Each family has one file.

A file describes, in the form of data (`checkpoints.family`), how the family's models differ from Llama: config keys,
GGUF keys, tensor names, layers, unsupported variants, and golden cases. `checkpoints.registry` finds the files.
"""
