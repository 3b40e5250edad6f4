"""Block-sparse attention for video diffusion and long-context language models."""

__version__ = "0.1.0"
