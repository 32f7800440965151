"""Which family runs an MLP, and whether it pays: sizes in, a decision out."""
