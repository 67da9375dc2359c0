"""What the scripts share. You need not read it to understand a model. It imports no script and no model."""
