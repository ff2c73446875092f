"""The tables, as they are after the last migration."""

from __future__ import annotations

from sqlalchemy import Column, DateTime, ForeignKey, LargeBinary, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

users = Table(
    "users",
    metadata,
    Column("id", String(256), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("quotas", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("disabled_at", DateTime(timezone=True)),
    Column("identity", String(600), unique=True, index=True),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("user_id", String(256), ForeignKey("users.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("name", String(128), nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Column("scopes", String(256), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
    Column("parent_id", String(32), index=True),
)

specs = Table(
    "specs",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("owner_id", String(256), primary_key=True, index=True),
    Column("body", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)
