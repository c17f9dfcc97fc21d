"""The command line, one file a command group; `main` is the entry point."""
