"""What people see of a plan: the simulated forms, pictures and a page without external resources.

Called by `agentrl.cli.plan`. Invariant: nothing is computed here that the ledger, the choice or the simulator computes.
"""
