"""Learning from pictures: heights of bars in charts."""
