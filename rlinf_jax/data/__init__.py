"""Questions of your own: files, chat templates, mixtures and their order."""
