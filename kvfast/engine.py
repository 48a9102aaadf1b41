"""The names that engines use besides the public ones of `kvfast`."""
