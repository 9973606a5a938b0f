"""Groups of commands; ``register(app)`` of each module adds its commands to the command line."""
