"""Runs the processes of a run on one machine: the run's folder, its endpoints, the child processes, the supervisor."""
