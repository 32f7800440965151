"""From tensors to a launch: which kernel, which configuration, which arguments."""
