"""What one step of a workflow costs."""
