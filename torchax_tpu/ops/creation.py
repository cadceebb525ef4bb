"""creation ops."""
