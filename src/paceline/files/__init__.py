"""Finding, downloading and reading model files, which are untrusted input."""
