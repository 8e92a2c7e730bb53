"""The papers' tables and figures as recipes, what runs them, and the report of what came out."""
