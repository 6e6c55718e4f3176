"""What both services stand on: settings, server life, errors, logs, models. Knows neither service."""
