"""Many rows: the first products with the activation in their epilogue, then the second product."""
