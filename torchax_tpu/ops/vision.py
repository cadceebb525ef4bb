"""vision ops."""
