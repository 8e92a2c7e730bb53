"""What people look at: the live pages of `keel ui`, their charts, and `keel watch`."""
