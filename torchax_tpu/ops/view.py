"""view ops."""
