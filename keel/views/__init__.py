"""The live pages of `keel ui` and the charts of pages and reports."""
