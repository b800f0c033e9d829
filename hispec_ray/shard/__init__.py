"""A process's part of the model, and the ways to reach it."""
