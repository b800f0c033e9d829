"""Arithmetic word problems with worked solutions, and the tokenizer of the small model that learns them."""
