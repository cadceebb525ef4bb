"""fft ops."""
