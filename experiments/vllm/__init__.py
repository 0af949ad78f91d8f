"""Overhead of generating with vLLM."""
