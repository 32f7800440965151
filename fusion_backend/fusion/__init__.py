"""The pass: it matches, judges and rewrites an FX graph."""
