"""Read the right file, submit its code: the built-in demo, and the example to copy."""
