"""The classes that users see: names, checks, documentation. No arithmetic on tokens."""
