"""`paceline certify`: tests whether the speculation of an OpenAI-compatible endpoint is lossless.

This package imports neither torch nor models, and it only uses HTTP: `python -m paceline.certify` works for any server.
"""
