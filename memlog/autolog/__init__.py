"""Detect optimizer steps, and publish a batch event for each."""
