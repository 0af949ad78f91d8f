"""What demonstrations are worth to a learner that remembers."""
