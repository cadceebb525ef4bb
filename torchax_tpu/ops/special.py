"""special ops."""
