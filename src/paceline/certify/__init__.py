"""`paceline certify`: tests if the speculation of an OpenAI-compatible endpoint is lossless.

The room imports neither torch nor models, and it speaks only HTTP: `python -m paceline.certify` works for any server.
"""
