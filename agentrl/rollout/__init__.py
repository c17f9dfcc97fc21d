"""Turns tasks into accepted groups of episodes."""
