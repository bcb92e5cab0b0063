"""The only package that touches transformers: configs, weights, caches, rotary modules, queries."""
