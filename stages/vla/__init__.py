"""Vision-language-action models: from pictures and text to actions."""
