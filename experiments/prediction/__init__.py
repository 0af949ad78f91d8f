"""What the planner predicts, against what is then measured."""
