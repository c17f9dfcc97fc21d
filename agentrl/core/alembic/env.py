"""Alembic's entry script: migrates over the connection that `agentrl.core.db` passes in."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
)
with context.begin_transaction():
    context.run_migrations()
