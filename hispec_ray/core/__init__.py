"""Who runs when, on which blocks: no torch, no ray."""
