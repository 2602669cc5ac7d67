"""The entry points: fit, validate, test and predict, and what they set up and tear down."""
