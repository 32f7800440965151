"""From an activation's expression to the source of a kernel."""
