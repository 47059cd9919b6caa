"""Language models. Dense families share one transformer; their `TextSpec` holds what differs."""
