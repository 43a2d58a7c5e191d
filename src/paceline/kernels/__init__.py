"""Matrix products and quantisation."""
