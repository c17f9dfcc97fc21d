"""What each child process runs: one module a role, with `run(context)`. The only place where rooms meet by class."""
