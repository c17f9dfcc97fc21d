"""The wire protocols that harnesses speak."""
