"""Keel on several machines: credentials, registration, health checks, and a trial on one machine."""
