"""π0 and π0.5: model, action expert, critic, files, and policies."""
