"""Names of Keel 0.1, kept until 0.3."""
