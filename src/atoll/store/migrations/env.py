"""Alembic runs this. The connection comes from the store, which has opened the database already."""

from __future__ import annotations

from alembic import context

from atoll.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
