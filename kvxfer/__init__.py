"""kvxfer: turn a small model's KV cache into a large one's, and measure honestly whether that is worth doing."""

__version__ = "0.1.0"
