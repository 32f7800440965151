"""One MLP as data: its layers, activation, operands and norm."""
