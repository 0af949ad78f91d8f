"""What pieces are worth, and what interpreting costs."""
