"""Exact hierarchical speculative decoding as an OpenAI-compatible service on Ray."""
