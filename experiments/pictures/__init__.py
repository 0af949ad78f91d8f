"""Pictures of the documentation, drawn from the planner's simulation."""
