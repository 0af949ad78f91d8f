"""One H100: what plans predict, and what it does."""
