"""Small worlds for agents, and demonstrations that models learn first."""
