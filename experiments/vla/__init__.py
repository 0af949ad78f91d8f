"""Vision-language-action policies: learning, and speed of decoding."""
