"""Caches in the place of others."""

import time


class WrappedCache:
    """A cache that does as another one, `cache`, where its class does not say otherwise."""

    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return len(self.cache)

    def __getattr__(self, name):
        return getattr(self.cache, name)


class TimedCache(WrappedCache):
    """A cache, and the seconds of its calls of `attend` by a clock; they get `options` besides."""

    def __init__(self, cache, clock=time.perf_counter, **options):
        super().__init__(cache)
        self.seconds, self._clock, self._options = 0.0, clock, options

    def attend(self, *args, **options):
        start = self._clock()
        try:
            return self.cache.attend(*args, **options, **self._options)
        finally:
            self.seconds += self._clock() - start
