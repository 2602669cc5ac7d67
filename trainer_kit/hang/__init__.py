"""The hang watchdog: it detects a rank that hangs, reports which one and where, and exits with code 75."""
