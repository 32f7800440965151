"""Few rows: two launches that overlap and read each weight once."""
