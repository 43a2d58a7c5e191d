"""Matrix products, quantisation and activations."""
