"""optim ops."""
