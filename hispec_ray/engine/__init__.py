"""The step loop: text in, text out."""
