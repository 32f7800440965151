"""Backward: the gradient of the hidden values, through the activation."""
