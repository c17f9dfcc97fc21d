"""The sandbox controller and its backends."""
