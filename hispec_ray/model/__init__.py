"""One decoder, its weights, its cache."""
