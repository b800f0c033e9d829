"""The OpenAI-compatible service on Ray Serve."""
