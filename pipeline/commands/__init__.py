"""Groups of commands; ``commands`` of each module is added to the command line."""
