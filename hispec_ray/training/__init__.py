"""Post-training of exits: a model whose shallow layers are taught to say what its full depth says."""
