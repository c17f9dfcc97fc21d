"""Doubles that ship with the package: a scripted engine, an in-memory sandbox."""
