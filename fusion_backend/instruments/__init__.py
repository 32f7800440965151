"""They explain and profile somebody's model."""
