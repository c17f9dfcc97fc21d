"""Publishes policy versions and brings replicas to them, verified."""
