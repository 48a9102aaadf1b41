"""Tables: where the tokens of a sequence lie, and what they are stored as."""
