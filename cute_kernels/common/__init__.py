"""Pieces that several kernels share."""
