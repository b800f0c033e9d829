"""The algorithm: how levels guess, check and commit; knows no model and no scheduler."""
