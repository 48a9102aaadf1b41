"""Where the values of a `PromptCache` are kept. `Store` is the interface of all stores, and of your own.

- store: `Store`, `Value`, `Entry`
- urls: the store of each URL; a new store is entered here
- folder, folder_index: a folder, and its index in SQLite
- redis, redis_connection: a server of Redis or Valkey
- cloud: an object store
- tiered: a folder in front of a far store
- encrypted: a store whose values are encrypted at rest
- troubles: failures, told once
"""

from kvfast.prompts.stores.encrypted import EncryptedStore
from kvfast.prompts.stores.folder import FolderStore
from kvfast.prompts.stores.store import Entry, Store, Value
from kvfast.prompts.stores.tiered import TieredStore
from kvfast.prompts.stores.urls import open_store

__all__ = ["EncryptedStore", "Entry", "FolderStore", "Store", "TieredStore", "Value", "open_store"]
