"""The command line's further commands, a module each: ``register(app)`` adds them."""
