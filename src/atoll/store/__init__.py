"""What the service remembers besides its sandboxes: users, their keys, and the catalogue of specs.

SQL lives here and nowhere else. SQLite by default, PostgreSQL by URL; both pass the same tests.
"""

from atoll.store.rows import ApiKey, Quotas, Role, StoredSpec, User
from atoll.store.store import Store

__all__ = ["ApiKey", "Quotas", "Role", "Store", "StoredSpec", "User"]
