"""The ClientApp: answers query, train and evaluate; local training; client state."""
