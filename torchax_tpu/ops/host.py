"""host ops."""
