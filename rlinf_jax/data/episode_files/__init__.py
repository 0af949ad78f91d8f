"""What every format of episodes has: its interface, and stored pictures."""
