"""The apps of this repository, as modules."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from flwr.clientapp import ClientApp

APPS = Path(__file__).parents[2] / "apps"


def app_modules(folder: str, package: str) -> tuple[ClientApp, ModuleType]:
    sys.path.insert(0, str(APPS / folder))
    app = import_module(f"{package}.client_app").app
    return app, import_module(f"{package}.task")
