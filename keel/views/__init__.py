"""The live pages of `keel ui`, their charts, and `keel watch`."""
