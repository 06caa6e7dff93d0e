"""Verifiers and critics."""
