"""Wires the rooms into processes."""
