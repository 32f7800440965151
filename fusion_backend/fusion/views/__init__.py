"""Views on FX nodes: what a node computes, writes and reads."""
