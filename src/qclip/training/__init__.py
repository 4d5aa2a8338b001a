"""Private training: from a model, an optimizer and data to released gradients and an epsilon."""
