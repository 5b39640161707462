"""Settings of all tests: none may fail because the machine is busy."""

from hypothesis import settings

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
