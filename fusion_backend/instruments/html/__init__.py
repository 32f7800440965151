"""The report as one HTML file, and fragments of it for notebooks."""
