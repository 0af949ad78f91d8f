"""Compiler passes that lower a flow and a plan to one program per place."""
