"""The APIs of the server: one module for each, which decodes its bodies and encodes its answers."""
