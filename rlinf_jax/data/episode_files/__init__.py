"""The interface of every format of episodes, and stored pictures."""
