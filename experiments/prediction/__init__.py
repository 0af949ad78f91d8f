"""Compares predicted with measured seconds."""
