"""Tools that a model may call: its own functions and built-in ones."""

from rlinf_jax.agents.tools.function_tool import Tool, tool

__all__ = ['Tool', 'tool']
