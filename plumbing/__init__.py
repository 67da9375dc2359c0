"""What the scripts share. Models can be read without it. It imports no script and no model."""
