"""Several narrow layers in a row: one kernel for all of them."""
