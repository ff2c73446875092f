"""Keys know the key they were made with, users whom their provider knows, and specs are named by each owner."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None

_ANY_ISSUER = "*|"
"""Marks users from before identities were stored: the provider's user of the same name takes the record over. Those
who administrate are left out, as nothing tells them from a local administrator; they are linked by hand."""


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("parent_id", sa.String(32)))
    op.create_index("ix_api_keys_parent_id", "api_keys", ["parent_id"])
    # An index and not a constraint: SQLite would copy and drop the table for that, and the keys of its users with it.
    op.add_column("users", sa.Column("identity", sa.String(600)))
    op.create_index("ix_users_identity", "users", ["identity"], unique=True)
    users_table = sa.table("users", sa.column("id"), sa.column("role"), sa.column("identity"))
    op.execute(
        users_table.update()
        .where(users_table.c.role == "user", users_table.c.id != "admin")
        .values(identity=sa.literal(_ANY_ISSUER) + users_table.c.id)
    )
    specs_table = sa.table("specs", sa.column("owner_id"))
    op.execute(specs_table.update().where(specs_table.c.owner_id.is_(None)).values(owner_id=""))
    with op.batch_alter_table("specs") as specs:
        specs.alter_column("owner_id", existing_type=sa.String(256), nullable=False)
        specs.drop_constraint("pk_specs", type_="primary")
        specs.create_primary_key("pk_specs", ["id", "owner_id"])


def downgrade() -> None:
    raise NotImplementedError("specs of several users may have one name by now")
