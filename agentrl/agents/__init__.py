"""The programs that play episodes against the gateway."""
