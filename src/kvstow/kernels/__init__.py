"""Fused kernels: device source, what it is specialised for, and loaders for each engine."""
