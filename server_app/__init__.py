"""The ServerApp: reads the config, runs the rounds, evaluates, records, resumes."""
