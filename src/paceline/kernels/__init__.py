"""Linear layers, quantisation and activations."""
