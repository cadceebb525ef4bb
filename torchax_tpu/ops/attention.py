"""attention ops."""
