"""The complete proof: every claim, its commands, and what they found."""
