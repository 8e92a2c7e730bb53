"""The ClientApp: answers query, train and evaluate; local training; what a client keeps."""
