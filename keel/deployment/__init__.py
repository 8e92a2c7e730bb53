"""Keel on several machines: credentials, supervision, submission, a look at what is wrong."""
