"""Rewards of completions: verified answers, formats, functions of your own."""
