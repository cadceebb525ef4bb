"""foreach ops."""
