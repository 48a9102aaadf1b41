"""Where the values of a `PromptCache` are kept: a folder, a Redis server, an object store, or a folder in front of one of those.

`Store` is the interface of all of them, and of your own.
"""

from kvfast.prompts.stores.folder import FolderStore
from kvfast.prompts.stores.store import Entry, Store, Value
from kvfast.prompts.stores.tiered import TieredStore
from kvfast.prompts.stores.urls import open_store

__all__ = ["Entry", "FolderStore", "Store", "TieredStore", "Value", "open_store"]
