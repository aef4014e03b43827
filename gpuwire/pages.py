"""Templates of the pages that programs serve: always escaped, and a name that is not there is an error, never a blank."""

from __future__ import annotations

from collections.abc import Callable

import jinja2


def templates(package: str, *filters: Callable[..., str]) -> jinja2.Environment:
    """The templates of `package`, with `filters` under their own names."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update({function.__name__: function for function in filters})
    return environment
