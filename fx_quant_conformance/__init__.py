"""The doors of the installed suite: a plugin for ``pytest --pyargs conformance``, and the console command.

pytest loads the plugin in every project of an environment. Therefore nothing here imports a module of another package
before it is asked for: a project may have a ``conformance`` or ``reports`` of its own. PYTEST_DONT_REWRITE: the command
is imported before pytest, which would warn that it is too late to rewrite the package's assertions.
"""
