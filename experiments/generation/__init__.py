"""Generation of completions whose lengths have a long tail."""
