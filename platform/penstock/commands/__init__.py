"""The groups of the `penstock` command. Imported once the terminal's language is active: help is translated then."""
