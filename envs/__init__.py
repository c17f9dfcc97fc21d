"""Task environments, one folder each."""
