"""Tokens of videos to packed blocks and back, in one pass each."""

from sparse_atten.packing.move import Tiles, pack_and_pool, preload, unpack

__all__ = ["Tiles", "pack_and_pool", "preload", "unpack"]
