"""A store in a dict, which counts its calls and can fail, lie and be late."""

import time

from kvfast.prompts.stores import Entry, Store, Value


class DictStore(Store):
    url = "dict"

    def __init__(self):
        self.values, self.calls, self.used = {}, [], []
        self.error = self.delay = None
        self.changed = lambda key, value: value

    def _called(self, name, keys):
        self.calls.append((name, len(keys)))
        if self.delay:
            time.sleep(self.delay)
        if self.error:
            raise self.error

    def get_many(self, keys):
        self._called("get", keys)
        found = [self.changed(key, self.values.get(key)) for key in keys]
        return [None if value is None else Value(value) for value in found]

    def put(self, key, value):
        self._called("put", [key])
        self.values[key] = bytes(value)
        return True

    def contains_many(self, keys):
        self._called("contains", keys)
        return [key in self.values for key in keys]

    def touch(self, keys, is_hit=True):
        self._called("touch", keys)
        self.used += keys

    def delete(self, keys):
        self._called("delete", keys)
        for key in keys:
            self.values.pop(key, None)

    def entries(self):
        return [Entry(key, len(value), 0.0, 0) for key, value in self.values.items()]

    def keys(self, kind):
        return [key for key in self.values if key.startswith(kind)]
