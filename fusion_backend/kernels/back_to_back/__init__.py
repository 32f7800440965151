"""Narrow MLPs: both products in one kernel; hidden values stay on the chip."""
