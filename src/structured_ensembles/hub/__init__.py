"""An ensemble as a folder for sharing (its file, config.json, a model card), and that folder as a hub's repository."""
