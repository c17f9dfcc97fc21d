"""Where sandboxes are placed."""
