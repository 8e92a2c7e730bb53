"""Keel on several machines: credentials, registration, health checks, and a local trial."""
